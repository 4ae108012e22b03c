"""Compiled functions: of tensors, of one row, and as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import NestedKey
from recurl.execution.compiled import CompiledFunction, Recorder, function_of, read_function, write_function
from recurl.execution.compiled import function as compiled
from recurl.execution.lowering import Entries, Network
from recurl.modules import LSTMModule, MaskedCategorical, ObservationNorm, ProbabilisticActor
from recurl.recurrence.cpu import instruction_sets
from recurl.sequences.mode import ExplorationType, set_exploration_type

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")

READS: list[NestedKey] = ["observation", "action_mask", "is_init", "h", "c"]
WRITES: list[NestedKey] = ["action", ("next", "h"), ("next", "c")]


def policy() -> nn.Module:
    torch.manual_seed(0)
    encode = Mod(nn.Sequential(ObservationNorm((4,)), nn.Linear(4, 6), nn.ELU()), ["observation"], ["embedding"])
    keys = (["embedding", "h", "c"], ["memory", ("next", "h"), ("next", "c")])
    memory = LSTMModule(6, 9, num_layers=2, in_keys=keys[0], out_keys=keys[1])
    modules = Seq(encode, memory, Mod(nn.Linear(9, 3, bias=False), ["memory"], ["logits"]))
    inputs = {"logits": "logits", "mask": "action_mask"}
    return ProbabilisticActor(modules, inputs, distribution_class=MaskedCategorical, return_log_prob=True)


def tensors(rows: int) -> list[torch.Tensor]:
    states = [torch.randn(rows, 2, 9) for _ in range(2)]
    mask = torch.rand(rows, 3) < 0.5
    mask[:, 0] = True
    return [torch.randn(rows, 4), mask, torch.arange(rows).unsqueeze(1) % 3 == 1, *states]


def entries(given: list[torch.Tensor]) -> Entries:
    return Entries(dict(zip(READS, given, strict=True)), torch.Size([len(given[0])]))


def function(actor: nn.Module, recorder: type[Recorder] | None = None) -> CompiledFunction:
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        return function_of(Network([actor]), entries(tensors(1)), READS, WRITES, recorder)


def expected(actor: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        found = Network([actor])(entries(given))
    return [found[key] for key in WRITES]


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for value, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, other, rtol=2e-6, atol=1e-6)


def test_any_number_of_rows() -> None:
    actor = policy()
    step = function(actor)
    for rows in (1, 3, 30):
        given = tensors(rows)
        assert_close(step(given), expected(actor, given))
        given[0] = given[0].t().contiguous().t()
        given[2] = given[2].flatten()
        assert_close(step(given), step([value.contiguous() for value in given]))


def test_one_row_of_arrays() -> None:
    actor = policy()
    row = function(actor).one_row()
    for _ in range(3):
        given = tensors(1)
        for array, value in zip(row.inputs, given, strict=True):
            array[...] = value[0].numpy()
        assert row.run()
        assert_close([torch.from_numpy(array).unsqueeze(0) for array in row.outputs], expected(actor, given))


def test_a_file_holds_the_function(tmp_path: Path) -> None:
    actor, recorders = policy(), list[Recorder]()

    def record(dtype: torch.dtype) -> Recorder:
        recorders.append(Recorder(dtype))
        return recorders[-1]

    with set_exploration_type(ExplorationType.DETERMINISTIC):
        step = function_of(Network([actor]), entries(tensors(1)), READS, WRITES, record)
    path = tmp_path / "policy.recurl"
    write_function(step, recorders[0], path)
    again, given = read_function(path), tensors(5)
    assert (again.inputs, again.outputs) == (step.inputs, step.outputs)
    found = again(given)
    assert all(torch.equal(*pair) for pair in zip(found, step(given), strict=True))
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.zero_()
    assert all(torch.equal(*pair) for pair in zip(again(given), found, strict=True))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = policy()
    step, given = function(actor), tensors(2)
    with pytest.raises(ArgumentError, match=r"takes torch.float32 of shape \[2, 4\], got torch.float64 of shape"):
        step([given[0].double(), *given[1:]])
    with set_exploration_type(ExplorationType.RANDOM), pytest.raises(UnsupportedError, match="draws random numbers"):
        function_of(Network([actor]), entries(given), READS, WRITES)
    with pytest.raises(
        UnsupportedError, match=r"reads entries that are no arguments, or doesn't write outputs: \['c'\]"
    ):
        function_of(Network([actor.module[0]]), entries(given), READS[:-1], WRITES[1:])
    with pytest.raises(UnsupportedError, match="GELU has no C\\+\\+ implementation"):
        function_of(Network([Mod(nn.GELU(), ["observation"], ["out"])]), entries(given), READS, ["out"])
    with pytest.raises(UnsupportedError, match="function is not a TensorDict module"):
        function_of(Network([lambda td: td]), entries(given), READS, WRITES)
    monkeypatch.setattr(compiled, "missing", lambda: "there was no compiler")
    with pytest.raises(UnsupportedError, match="can't be compiled: there was no compiler"):
        function_of(Network([actor]), entries(given), READS, WRITES)


def test_arguments_that_a_builder_rejects_are_not_written(tmp_path: Path) -> None:
    recorder = Recorder(torch.float32)
    recorder.calls.append(("linear", (np.zeros(1),), {}))
    with pytest.raises(TypeError, match="ndarray is not an argument of a ProgramBuilder"):
        write_function(function(policy()), recorder, tmp_path / "policy.recurl")
