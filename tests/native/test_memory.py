"""Step-by-step writes: the library's copies equal those of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recurl.native import memory as module
from recurl.native.memory import StepMemory

CASES = {
    "rows": ((5, 7, 3), torch.float32, 1),
    "no rows": ((7, 3), torch.float64, 0),
    "flags": ((5, 7, 1), torch.bool, 1),
    "numbers": ((5, 7), torch.int64, 1),
    "images": ((5, 7, 2, 4, 4), torch.uint8, 1),
    "half": ((5, 7, 3), torch.bfloat16, 1),
    "two batch dimensions": ((2, 5, 7, 3), torch.float32, 2),
    "complex": ((5, 7, 3), torch.complex64, 1),
    "empty": ((5, 7, 0), torch.float32, 1),
}


def _drawn(shape: Any, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * 100).to(dtype)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_every_step_lands_in_its_place(case: str) -> None:
    shape, dtype, lead = CASES[case]
    expected, whole = _drawn(shape, dtype), torch.zeros(shape, dtype=dtype)
    memory = StepMemory([torch.zeros_like(whole).movedim(lead, 0), whole.movedim(lead, 0)], lead)
    for step, value in enumerate(expected.unbind(lead)):
        assert memory.write(step, [torch.ones_like(value), value.contiguous()])
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    "value", [torch.arange(10.0).reshape(2, 5).T, torch.arange(10).reshape(5, 2), torch.ones(5, 1).expand(5, 2)]
)
@torch.no_grad()
def test_other_layouts_and_dtypes_are_converted(value: Tensor) -> None:
    whole = torch.zeros(5, 7, 2)
    memory = StepMemory([whole.movedim(1, 0)], 1)
    assert memory.write(3, [value])
    assert torch.equal(whole[:, 3], value.to(torch.float32))
    assert not whole[:, :3].any()
    assert not whole[:, 4:].any()


@torch.no_grad()
def test_some_rows_of_a_batch() -> None:
    whole = torch.zeros(6, 4, 3)
    memory = StepMemory([whole[2:4].movedim(1, 0), torch.zeros(4, 2, 1)], 1)
    assert memory.write(1, [torch.ones(2, 3), torch.ones(2, 1)])
    assert whole.sum((1, 2)).tolist() == [0, 0, 3, 3, 0, 0]
    assert whole[:, 1].sum() == 6


@torch.no_grad()
def test_small_rows_are_copied_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("torch was asked")

    memory = StepMemory([torch.zeros(2, 5, 3)], 1)
    monkeypatch.setattr(module, "foreach_copy_", refuse)
    assert memory.write(0, [torch.ones(5, 3)])


@pytest.mark.parametrize("value", [None, 1.0, {}, torch.ones(3, 5), torch.ones(5, 3, 1)])
@torch.no_grad()
def test_what_does_not_fit_is_not_written(value: object) -> None:
    whole = torch.zeros(2, 4, 5, 3)
    memory = StepMemory(list(whole), 1, [0])
    assert not memory.write(0, [torch.ones(5, 3), value])
    assert not memory.write(0, [value, torch.ones(5, 3)])
    assert not whole.any()


@pytest.mark.parametrize("fresh", [True, False])
@torch.no_grad()
def test_what_is_repeated_is_copied_as_it_is_by_then(fresh: bool) -> None:
    after, root = torch.zeros(4, 5, 3), torch.zeros(4, 5, 3)
    memory = StepMemory([after, root], 1, [0])
    value = torch.ones(5, 3)
    for step in range(4):
        following = torch.full((5, 3), step + 2.0)
        assert memory.write(step, [following, value])
        value = following.clone() if fresh else following
        if step == 1:
            value.data = torch.full((5, 3), -1.0)
        elif step == 2:
            value.mul_(10)
    assert root[:, 0, 0].tolist() == [1.0, 2.0, -1.0, 40.0]
    assert after[:, 0, 0].tolist() == [2.0, 3.0, 4.0, 5.0]
