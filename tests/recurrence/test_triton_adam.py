from __future__ import annotations

import pytest

from tests.programs import Programs

from .kernel_tests import core_and_rest, run

pytestmark = pytest.mark.slow

LIMITS = {"one": 5e-7, "block": 5e-7, "layers": 5e-7, "large": 1e-5}
CHECKS = [f"{name} {most}" for name in LIMITS for most in ("0.5", "inf")]


@pytest.mark.parametrize("names", core_and_rest(("block 0.5", "layers inf"), CHECKS))
def test_interpreted_steps_are_those_of_torch(names: list[str]) -> None:
    found = run("triton_adam_interpreted", *names, TRITON_INTERPRET="1")
    assert [*found] == names
    assert {name: error for name, (error,) in found.items() if not float(error) <= LIMITS[name.split()[0]]} == {}


@pytest.mark.parametrize("capability", ["90", pytest.param("80", marks=pytest.mark.kernels)])
def test_compiled_kernels_do_not_spill(capability: str, programs: Programs) -> None:
    found = run("triton_adam_offline", capability, start=programs.run, TRITON_INTERPRET="0")
    assert found.keys() == {"squares_kernel", "decide_kernel", "adam_kernel"}
    assert all(spilled == "0" for spilled, _ in found.values())
