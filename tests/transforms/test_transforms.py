from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UnsupportedError
from recurl.core.specs import Bounded, Composite, Unbounded
from recurl.transforms import Compose, InitTracker, RewardSum, StepCounter, TensorDictPrimer, Transform
from recurl.transforms.base import Constant, constants_of, reset_mask


def root(batch=(2,), **entries):
    done = {key: torch.zeros(*batch, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
    return TensorDict({**done, **entries}, batch)


def masked(mask, td):
    return td.copy().set("_reset", torch.tensor(mask)[:, None])


def after(batch=(2,), **entries):
    return root(batch, reward=torch.ones(*batch, 1), **entries)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_reset_mask_has_a_last_dimension(shape):
    mask = reset_mask(TensorDict({"_reset": torch.ones(shape, dtype=torch.bool)}, [2]))
    assert mask is not None
    assert mask.shape == (2, 1)
    assert reset_mask(None) is None
    assert reset_mask(TensorDict({}, [2])) is None


def test_a_transform_acts_in_an_environment_only():
    with pytest.raises(UnsupportedError, match=r"use TransformedEnv\(env, InitTracker"):
        InitTracker()(root())


def test_iteration():
    tracker, counter = InitTracker(), StepCounter()
    assert list(tracker) == [tracker]
    both = Compose(tracker, Compose(counter))
    assert list(both) == [tracker, counter]
    assert both[1] is counter
    assert len(both) == 2
    both.append(tracker)
    assert len(both) == 3
    with pytest.raises(ArgumentTypeError, match="A Transform instance is required"):
        Compose(InitTracker)


def test_hooks_default_to_the_identity():
    class Nothing(Transform):
        pass

    spec, td = Composite(a=Unbounded(1)), root()
    both = Compose(Nothing(), Nothing())
    assert both.transform_observation_spec(spec) is spec
    assert both.transform_state_spec(spec) is spec
    assert both.transform_reward_spec(spec) is spec
    assert both.transform_done_spec(spec) is spec
    assert both._reset(None, td) is td
    assert both._step(td, td) is td
    assert repr(both) == "Compose(Nothing(), Nothing())"


def test_constants_are_those_of_the_class_that_has_the_hooks():
    class Named(InitTracker):
        pass

    class More(InitTracker):
        def _reset(self, tensordict, tensordict_reset):
            return super()._reset(tensordict, tensordict_reset)

    class Both(More):
        def constants(self):
            return super().constants()

    flag = [Constant("is_init", True, False)]
    assert constants_of(InitTracker()) == constants_of(Named()) == constants_of(Both()) == flag
    assert constants_of(TensorDictPrimer({("a", "b"): Unbounded(2)}, default_value=0.5)) == [
        Constant(("a", "b"), 0.5, None)
    ]
    assert constants_of(TensorDictPrimer(a=Unbounded(2), random=True)) is None
    assert [constants_of(transform) for transform in (More(), RewardSum(), StepCounter())] == [None] * 3
    assert not constants_of(Transform())


class TestInitTracker:
    def test_flag(self):
        tracker = InitTracker()
        spec = tracker.transform_observation_spec(Composite(shape=(2,)))
        assert spec["is_init"].shape == (2, 1)
        td = tracker._reset(None, root())
        assert td["is_init"].all()
        assert not tracker._step(td, after())["is_init"].any()

    def test_partial_reset_raises_the_flag_of_its_rows_and_keeps_the_others(self):
        tracker = InitTracker()
        stepped = root(is_init=torch.zeros(2, 1, dtype=torch.bool))
        request = masked([False, True], stepped)
        assert tracker._reset(request, stepped.copy())["is_init"].flatten().tolist() == [False, True]
        fresh = root(is_init=torch.ones(2, 1, dtype=torch.bool))
        assert tracker._reset(masked([False, True], fresh), fresh.copy())["is_init"].all()
        assert tracker._reset(request, root())["is_init"].flatten().tolist() == [False, True]

    @pytest.mark.parametrize("key", [("agents", "is_init"), "", 3])
    def test_a_key_is_a_string(self, key):
        with pytest.raises(ArgumentError, match="must be a non-empty string"):
            InitTracker(key)


class TestPrimer:
    def test_specs(self):
        primer = TensorDictPrimer({"h": Unbounded(1, 4)}, c=Unbounded(2, dtype=torch.float64))
        assert list(primer.primers.keys()) == ["h", "c"]
        for declare in (primer.transform_observation_spec, primer.transform_state_spec):
            spec = declare(Composite(shape=(3,)))
            assert spec["h"].shape == (3, 1, 4)
            assert declare(spec) == spec

    def test_values_at_reset(self):
        primer = TensorDictPrimer(h=Unbounded(1, 4, dtype=torch.float64), default_value=0.5)
        td = primer._reset(None, root())
        assert td["h"].dtype == torch.float64
        assert (td["h"] == 0.5).all()
        held = root(h=torch.ones(2, 1, 4, dtype=torch.float64))
        out = primer._reset(masked([False, True], held), held.copy())
        assert out["h"][:, 0, 0].tolist() == [1.0, 0.5]
        assert (held["h"] == 1).all()
        assert (primer._reset(masked([False, True], root()), root())["h"] == 0.5).all()

    def test_random_values(self):
        primer = TensorDictPrimer(Composite({("n", "h"): Bounded(2.0, 3.0, (4,))}), random=True)
        td = primer._reset(None, root())
        assert td["n", "h"].shape == (2, 4)
        assert (td["n", "h"] >= 2).all()
        kept = primer._reset(masked([True, False], td), td.copy())["n", "h"]
        assert torch.equal(kept[1], td["n", "h"][1])
        assert not torch.equal(kept[0], td["n", "h"][0])
        with pytest.raises(ArgumentError, match="random=True can't be used with default_value"):
            TensorDictPrimer(h=Unbounded(1), random=True, default_value=1.0)

    def test_step_keeps_the_entries_of_the_policy(self):
        primer = TensorDictPrimer(h=Unbounded(1), c=Unbounded(1))
        before = root(h=torch.zeros(2, 1), c=torch.full((2, 1), 3.0))
        out = primer._step(before, after(h=torch.ones(2, 1)))
        assert (out["h"] == 1).all()
        assert (out["c"] == 3).all()
        with pytest.raises(MissingKeyError, match="lacks the entry 'c'"):
            primer._step(root(h=torch.zeros(2, 1)), after())

    def test_without_expansion(self):
        primer = TensorDictPrimer(h=Unbounded(2, 4), expand_specs=False)
        assert primer.transform_observation_spec(Composite(shape=(2,)))["h"].shape == (2, 4)
        assert primer._reset(None, root())["h"].shape == (2, 4)
        with pytest.raises(ArgumentError, match="must start with the environment's batch size"):
            primer.transform_observation_spec(Composite(shape=(3,)))

    def test_refusals(self):
        with pytest.raises(ArgumentError, match="already declares it"):
            TensorDictPrimer(h=Unbounded(3)).transform_observation_spec(Composite(h=Unbounded(2)))
        with pytest.raises(ArgumentError, match="at least one entry"):
            TensorDictPrimer()
        with pytest.raises(ArgumentTypeError, match="must map keys to specs"):
            TensorDictPrimer(Unbounded(3))


class TestStepCounter:
    def test_counts_and_truncates(self):
        counter = StepCounter(max_steps=2)
        td = counter._reset(None, root())
        assert td["step_count"].dtype == torch.int64
        out = counter._step(td, after())
        assert out["step_count"].flatten().tolist() == [1, 1]
        assert not out["done"].any()
        out = counter._step(out, after())
        assert out["truncated"].all()
        assert out["done"].all()
        assert not out["terminated"].any()

    def test_truncations_of_the_environment_are_kept(self):
        counter = StepCounter(max_steps=2)
        ended = torch.tensor([[True], [False]])
        out = counter._step(counter._reset(None, root()), after().update({"truncated": ended, "done": ended}))
        assert torch.equal(out["truncated"], ended)
        assert torch.equal(out["done"], ended)

    def test_partial_reset(self):
        counter = StepCounter()
        held = root(step_count=torch.tensor([[4], [5]]))
        out = counter._reset(masked([True, False], held), held.copy())
        assert out["step_count"].flatten().tolist() == [0, 5]

    def test_other_keys_and_no_done(self):
        counter = StepCounter(1, truncated_key="cut", step_count_key="n", update_done=False)
        spec = counter.transform_done_spec(Composite(shape=(2,)))
        assert spec["cut"].shape == (2, 1)
        assert counter.transform_done_spec(spec) is spec
        td = counter._reset(None, root())
        assert not td["cut"].any()
        out = counter._step(td, after())
        assert out["cut"].all()
        assert not out["truncated"].any()
        assert not out["done"].any()

    def test_refusals(self):
        with pytest.raises(ArgumentError, match="at least 1"):
            StepCounter(0)
        with pytest.raises(MissingKeyError, match="lacks 'step_count'"):
            StepCounter()._step(root(), after())


class TestRewardSum:
    def test_sums(self):
        total = RewardSum()
        assert total.transform_observation_spec(Composite(shape=(2,)))["episode_reward"].shape == (2, 1)
        td = total._reset(None, root())
        for expected in (1.0, 2.0):
            td = total._step(td, after())
            assert td["episode_reward"].flatten().tolist() == [expected] * 2
        reset = total._reset(masked([True, False], td), td.copy())
        assert reset["episode_reward"].flatten().tolist() == [0.0, 2.0]

    def test_refusals(self):
        with pytest.raises(ArgumentError, match="one out_key per in_key"):
            RewardSum(["reward"], ["a", "b"])
        with pytest.raises(MissingKeyError, match="lacks 'total'"):
            RewardSum(out_keys=["total"])._step(root(), after())
