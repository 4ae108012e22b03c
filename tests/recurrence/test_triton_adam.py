from __future__ import annotations

import pytest

from tests.programs import Programs

from .test_triton import run

pytestmark = pytest.mark.slow

LIMITS = {"one": 5e-7, "block": 5e-7, "layers": 5e-7, "large": 1e-5}


def test_interpreted_steps_are_those_of_torch() -> None:
    found = run("triton_adam_interpreted", TRITON_INTERPRET="1")
    assert found.keys() == {f"{name} {most}" for name in LIMITS for most in ("0.5", "inf")}
    assert {name: error for name, (error,) in found.items() if not float(error) <= LIMITS[name.split()[0]]} == {}


@pytest.mark.parametrize("capability", ["80", "90"])
def test_compiled_kernels_do_not_spill(capability: str, programs: Programs) -> None:
    found = run("triton_adam_offline", capability, start=programs.run, TRITON_INTERPRET="0")
    assert found.keys() == {"squares_kernel", "decide_kernel", "adam_kernel"}
    assert all(spilled == "0" for spilled, _ in found.values())
