from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq

from recurl.execution.lowering import Entries, Network, leaves, like, takes_entries, unmarked


def step() -> Entries:
    return Entries.of(TensorDict({"x": torch.arange(2), "next": {"inner": {"y": torch.ones(2, 1)}}}, [2]))


def test_entries_answer_as_a_tensordict_does() -> None:
    entries = step()
    td = entries.to_tensordict()
    for key in ("x", "next", ("next", "inner", "y"), ("x",), "none", ("next", "none"), ("next", "inner", "none", "z")):
        assert (key in entries) == (key in td), key
        assert (entries.get(key, None) is None) == (td.get(key, None) is None), key
    assert entries["next", "inner", "y"] is td["next", "inner", "y"]
    with pytest.raises(KeyError):
        _ = entries["next", "none"]
    entries.set(("made", "on", "the way"), torch.zeros(2))
    assert entries["made", "on"].batch_size == torch.Size([2])
    assert entries.ndim == td.ndim == 1
    assert entries.pop("x", None) is td["x"]
    assert entries.pop("x", None) is None


def test_a_copy_has_separate_nested_entries_and_shares_tensors() -> None:
    entries = step()
    copy = entries.copy()
    copy.set(("next", "inner", "z"), torch.zeros(2))
    assert ("next", "inner", "z") not in entries
    assert copy["next", "inner", "y"] is entries["next", "inner", "y"]
    assert "next" not in entries.exclude("next", "other")
    assert "next" in entries


def test_leaves_of_entries_and_tensordict_are_the_same() -> None:
    assert (
        dict(leaves(step())).keys() == dict(leaves(step().to_tensordict())).keys() == {("x",), ("next", "inner", "y")}
    )


def test_like_creates_the_given_kind() -> None:
    made = {("a", "b"): torch.zeros(2)}
    assert isinstance(like(None, made, torch.Size([2]), None), TensorDict)
    assert isinstance(like(TensorDict({}, [2]), made, torch.Size([2]), None), TensorDict)
    entries = like(step(), made, torch.Size([2]), torch.device("meta"))
    assert isinstance(entries, Entries)
    assert entries["a", "b"].device.type == "meta"


class Marked:
    @takes_entries
    def act(self) -> None: ...


class Overriding(Marked):
    def act(self) -> None: ...


def test_the_mark_is_lost_when_overridden() -> None:
    assert unmarked(Marked(), "act") is None
    assert unmarked(Overriding(), "act") == "Overriding.act needs a TensorDict"
    replaced = Marked()
    replaced.act = lambda: None
    assert unmarked(replaced, "act") == "Marked.act needs a TensorDict"


@pytest.mark.parametrize("present", [False, True])
def test_a_sequence_that_selects_its_outputs_writes_no_other_entries(present: bool) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    network = Network([Seq(Mod(twice, ["x"], ["y"]), Mod(twice, ["y"], ["z"]), selected_out_keys=["z"])])
    assert network.obstacle is None
    data = TensorDict({"x": torch.arange(2)} | ({"y": torch.zeros(2)} if present else {}), [2])
    found, expected = network(Entries.of(data)), network(data.copy())
    assert found.keys() == expected.keys()
    assert ("y" in found) == present
    assert all(torch.equal(found[key], value) for key, value in expected.items())
