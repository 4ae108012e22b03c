import pytest
import torch
from tensordict import TensorDict

from recurl.collectors import Collector
from recurl.core import specs
from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.envs import GymEnv, ParallelEnv, SerialEnv, check_env_specs
from recurl.execution.lowering import Entries
from recurl.transforms import PreviousAction, PreviousReward


def with_previous(env):
    return env.append_transform(PreviousAction(env.action_spec_unbatched)).append_transform(PreviousReward())


def make(name="CartPole-v1", rows=3, mode=None):
    return with_previous(GymEnv(name, num_envs=rows, vectorization_mode=mode, categorical_action_encoding=True))


@pytest.mark.parametrize(
    ("spec", "actions", "encoded"),
    [
        (specs.Categorical(3), [0, 2], [[1, 0, 0], [0, 0, 1]]),
        (specs.Categorical(3), [[1, 0, 0], [0, 0, 1]], [[1, 0, 0], [0, 0, 1]]),
        (specs.OneHot(3), [0, 2], [[1, 0, 0], [0, 0, 1]]),
        (specs.OneHot(2), [[0, 1], [1, 0]], [[0, 1], [1, 0]]),
        (specs.Categorical(2, (2,)), [[0, 1], [1, 1]], [[1, 0, 0, 1], [0, 1, 0, 1]]),
        (specs.MultiCategorical([2, 3]), [[0, 2], [1, 0]], [[1, 0, 0, 0, 1], [0, 1, 1, 0, 0]]),
        (specs.MultiCategorical([[1, 2], [2, 1]]), [[[0, 1], [0, 0]]] * 2, [[1, 0, 1, 1, 0, 1]] * 2),
        (specs.Binary((2, 1), dtype=torch.int8), [[[0], [1]], [[1], [1]]], [[0, 1], [1, 1]]),
        (specs.Bounded(-1.0, 1.0, (1, 2)), [[[0.5, -1.0]], [[1.0, 0.0]]], [[0.5, -1.0], [1.0, 0.0]]),
        (specs.Unbounded((), dtype=torch.float64), [0.5, 3.0], [[0.5], [3.0]]),
    ],
)
def test_encodings_of_actions(spec, actions, encoded):
    transform, batch = PreviousAction(spec), [2]
    found = transform.encode(torch.tensor(actions), batch)
    assert found.tolist() == encoded
    declared = transform.transform_observation_spec(specs.Composite(shape=batch))["previous_action"]
    assert declared.is_in(found)
    assert declared.is_in(declared.zero())
    assert isinstance(declared, specs.Unbounded if found.is_floating_point() else specs.Binary)
    assert torch.equal(transform.encode(torch.tensor(actions)[0], []), found[0])


def test_leaves_of_a_nested_action_follow_each_other():
    spec = specs.Composite({"arm": specs.Bounded(-1.0, 1.0, (1,)), ("hand", "grip"): specs.Categorical(2)})
    action = TensorDict({"arm": torch.tensor([[0.5]]), "hand": {"grip": torch.tensor([1])}}, [1])
    transform = PreviousAction(spec)
    assert transform.encode(action, [1]).tolist() == [[0.5, 0.0, 1.0]]
    assert transform.encode(Entries.of(action), [1]).tolist() == [[0.5, 0.0, 1.0]]


def check_true(batch):
    """Each step holds the action and reward of the previous step, and zeros where an episode starts."""
    actions = torch.nn.functional.one_hot(batch["action"], batch["previous_action"].shape[-1])
    assert torch.equal(batch["next", "previous_action"].long(), actions)
    assert torch.equal(batch["next", "previous_reward"], batch["next", "reward"])
    done = batch["next", "done"][:, :-1]
    assert done.any()
    for key in ("previous_action", "previous_reward"):
        before = batch["next", key][:, :-1]
        assert torch.equal(batch[key][:, 1:], torch.where(done, torch.zeros_like(before), before))


@pytest.mark.parametrize("mode", [None, "sync", "vector_entry_point"])
@pytest.mark.parametrize("name", ["CartPole-v1", "recurl/RepeatPrevious-v0"])
def test_previous_action_and_reward_are_right_at_every_step(name, mode):
    collector = Collector(make(name, mode=mode), frames_per_batch=240)
    first, second = collector.collect(), collector.collect()
    check_true(first)
    assert not first["previous_action"][:, 0].any()
    assert not first["previous_reward"][:, 0].any()
    check_true(torch.cat([first, second], 1))


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
@pytest.mark.parametrize("inside", [True, False])
def test_serial_and_parallel_batches(inside):
    def single():
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        return with_previous(env) if inside else env

    for kind in (SerialEnv, ParallelEnv):
        with kind(2, single) as env:
            outer = env if inside else with_previous(env)
            check_env_specs(outer)
            check_true(outer.rollout(60, break_when_any_done=False))


def test_rows_that_are_reset_begin_without_a_past():
    collector = Collector(make("Pendulum-v1"), frames_per_batch=30)
    collector.collect()
    rows = torch.tensor([True, False, True])
    collector.reset_rows(rows)
    batch = collector.collect()
    for key in ("previous_action", "previous_reward"):
        assert not batch[key][rows, 0].any()
        assert batch[key][~rows, 0].all()


def test_the_past_is_carried_on_from_a_saved_state():
    collector = Collector(make("recurl/TMaze-v0"), frames_per_batch=30)
    collector.set_seed(0)
    collector.collect()
    state, rng = collector.state_dict(), torch.get_rng_state()
    following = collector.collect()
    again = Collector(make("recurl/TMaze-v0"), frames_per_batch=30)
    assert again.load_state_dict(state)
    torch.set_rng_state(rng)
    repeated = again.collect()
    assert following["previous_action"][:, 0].any()
    for key in ("previous_action", "previous_reward", "observation"):
        assert torch.equal(following[key], repeated[key])


def test_transforms_run_on_entries():
    env = make(rows=2)
    assert env.explain()["tensors"] is None


def test_unsupported_action_specs():
    env = GymEnv("CartPole-v1")
    with pytest.raises(ArgumentTypeError, match=r"takes the action spec of one environment, .* got GymEnv"):
        PreviousAction(env)  # type: ignore[arg-type] # rejected
    nothing = type("Nothing", (specs.TensorSpec,), {"rand": None, "is_in": None})
    with pytest.raises(ArgumentTypeError, match="can't encode actions of Nothing"):
        PreviousAction(nothing((), torch.float32, None))
    twice = env.append_transform(PreviousReward())
    with pytest.raises(ArgumentError, match="already has an entry 'previous_reward'"):
        twice.append_transform(PreviousReward())
    assert "earlier" in twice.append_transform(PreviousReward(out_key="earlier")).reset()
    with pytest.raises(MissingKeyError, match="PreviousReward needs the reward"):
        PreviousReward()._step(TensorDict({}, []), TensorDict({}, []))
    assert repr(PreviousAction(specs.Categorical(3))) == "PreviousAction(width=3, dtype=torch.int8)"
