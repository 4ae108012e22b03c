"""VecTensorEnv around simulators written against rsl_rl's protocol: ``rsl_rl/env/vec_env.py`` of version 5.5."""

from __future__ import annotations

import io
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from tensordict import TensorDict

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, ArgumentTypeError, RecurlWarning, UnsupportedError, UsageError
from recurl.core.specs import Bounded, Unbounded
from recurl.envs import InitTracker, StepCounter, VecTensorEnv, check_env_specs
from recurl.execution.readback import refuse_read_back
from recurl.trainers import PPOConfig, RunFolder, Trainer, load_agent

ROWS = 4


class Simulator:
    """Rows count their steps; row ``i`` times out after ``i + 2`` steps, and an action above 5 ends its episode.

    As simulators do, it resets done rows within the step, and overwrites its buffers at every step. Observations are
    the count and the number of the episode; the critic also sees the row's limit.
    """

    num_envs, num_actions, device, max_episode_length = ROWS, 2, "cpu", 5

    def __init__(self, final=None, seeds=None):
        self.final, self.seeds = final, [] if seeds is None else seeds
        self.episode_length_buf = torch.zeros(ROWS, dtype=torch.long)
        self.limits = torch.arange(ROWS) + 2
        self.episodes = torch.zeros(ROWS)
        self.resets = torch.zeros(ROWS)
        self.rewards, self.dones = torch.zeros(ROWS), torch.zeros(ROWS, dtype=torch.long)
        self.policy, self.critic = torch.zeros(ROWS, 2), torch.zeros(ROWS, 1)

    def seed(self, seed=-1):
        self.seeds.append(seed)
        return seed

    def reset(self):
        self._reset_rows(torch.ones(ROWS, dtype=torch.bool))
        return self.get_observations(), {}

    def _reset_rows(self, rows):
        self.episode_length_buf *= ~rows
        self.episodes += rows
        self.resets += rows

    def get_observations(self):
        self.policy[:, 0], self.policy[:, 1] = self.episode_length_buf, self.episodes
        self.critic[:, 0] = self.limits - self.episode_length_buf
        return TensorDict({"policy": self.policy, "critic": self.critic}, batch_size=[self.num_envs])

    def step(self, actions):
        self.episode_length_buf += 1
        time_outs = self.episode_length_buf >= self.limits
        fell = actions[:, 0] > 5
        self.rewards[:] = self.episode_length_buf
        self.dones[:] = time_outs | fell
        extras = {"time_outs": time_outs & ~fell, "log": {"/length": self.episode_length_buf.float().mean()}}
        if self.final is not None:
            extras[self.final] = {name: value.clone() for name, value in self.get_observations().items()}
        self._reset_rows(self.dones.bool())
        return self.get_observations(), self.rewards, self.dones, extras


class Older(Simulator):
    """The protocol of rsl_rl 2: observations are a tensor, and other groups are in the extras."""

    def get_observations(self):
        groups = super().get_observations()
        return groups["policy"], {"observations": {"critic": groups["critic"]}}

    def step(self, actions):
        (observations, others), rewards, dones, extras = super().step(actions)
        return observations, rewards, dones, {**extras, **others}


class Arrays(Simulator):
    """NumPy arrays of float64 instead of tensors."""

    def get_observations(self):
        return {name: value.numpy().astype(np.float64) for name, value in super().get_observations().items()}

    def step(self, actions):
        observations, rewards, dones, extras = super().step(actions)
        return observations, rewards.double().numpy(), dones.numpy(), {"time_outs": extras["time_outs"].numpy()}


def still(td):
    return td.set("action", torch.zeros(ROWS, 2))


def rolled(env, steps=9, policy=still):
    return env.rollout(steps, policy, break_when_any_done=False)


@pytest.mark.parametrize("kind", [Simulator, Older, Arrays])
def test_entries(kind):
    env = VecTensorEnv(kind())
    assert set(env.observation_spec.keys()) == {"policy", "critic"}
    assert env.observation_spec["policy"].dtype == torch.float32
    assert isinstance(env.action_spec_unbatched, Unbounded)
    assert env.batch_size == (ROWS,)
    check_env_specs(env.append_transform(InitTracker()))
    seen = rolled(env)
    # Row 0 times out at every second step; the root after it is the first of the next episode.
    assert seen["policy"][0, :, 0].tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert seen["policy"][2, :, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert seen["next", "reward"][0, :, 0].tolist() == [1, 2, 1, 2, 1, 2, 1, 2, 1]
    assert seen["next", "truncated"][0, :, 0].tolist() == [False, True] * 4 + [False]
    assert torch.equal(seen["next", "done"], seen["next", "truncated"])
    assert not seen["next", "terminated"].any()
    # Nothing says what was seen last: the observation before the step stands for it, in every group.
    assert seen["next", "policy"][0, :, 0].tolist() == [1, 1] * 4 + [1]
    assert seen["next", "critic"][0, :, 0].tolist() == [1, 1] * 4 + [1]
    assert (seen["next", "policy"][..., 1] == seen["policy"][..., 1]).all()  # never of the next episode


@pytest.mark.parametrize("name", ["final_obs", "final_observation", "final_observations", "terminal_observation"])
def test_the_true_last_observations_are_used_if_given(name):
    seen = rolled(VecTensorEnv(Simulator(final=name)))
    assert seen["policy"][0, :, 0].tolist() == [0, 1] * 4 + [0]
    assert seen["next", "policy"][0, :, 0].tolist() == [1, 2] * 4 + [1]
    assert seen["next", "critic"][0, :, 0].tolist() == [1, 0] * 4 + [1]


def test_rows_that_end_otherwise_are_terminated():
    env = VecTensorEnv(Simulator())
    fall = torch.zeros(ROWS, 2)
    fall[[1, 3], 0] = 6.0
    seen = rolled(env, 3, lambda td: td.set("action", fall))
    assert seen["next", "terminated"][:, :, 0].tolist() == [[False] * 3, [True] * 3, [False] * 3, [True] * 3]
    assert seen["next", "truncated"][:, :, 0].tolist() == [[False, True, False], *[[False] * 3] * 3]
    assert seen["policy"][1, :, 0].tolist() == [0, 0, 0]
    without = Simulator()
    step = without.step
    without.step = lambda actions: (*step(actions)[:3], {})  # as in Isaac Lab with is_finite_horizon
    seen = rolled(VecTensorEnv(without))
    assert torch.equal(seen["next", "terminated"], seen["next", "done"])
    assert seen["next", "done"].any()


def test_batches_are_those_of_single_steps():
    """A collector keeps no view of the simulator's buffers, which every step overwrites."""
    collector = Collector(VecTensorEnv(Simulator()), still, frames_per_batch=ROWS * 9)
    batch, expected = next(iter(collector)), rolled(VecTensorEnv(Simulator()))
    for key in ("policy", "critic", ("next", "policy"), ("next", "critic"), ("next", "reward"), ("next", "done")):
        assert torch.equal(batch[key], expected[key])
    again = next(iter(collector))
    assert torch.equal(again["policy"][:, 0, 1], batch["policy"][:, -1, 1] + batch["next", "done"][:, -1, 0])


def test_steps_and_resets_never_wait():
    env = VecTensorEnv(Simulator()).append_transform(InitTracker())
    root = env.reset()
    with refuse_read_back():
        for _ in range(6):
            root = env.maybe_reset(env.carry(env.step(still(root))))
    simulator = env.base_env.simulator
    assert simulator.resets.tolist() == [4, 3, 2, 2]  # one of each row to begin with, and then by itself


def test_a_seed_is_passed_on_at_the_next_reset():
    simulator = Simulator()
    env = VecTensorEnv(simulator)
    env.set_seed(3)
    assert simulator.seeds == []
    env.reset()
    env.reset()
    assert simulator.seeds == [3]
    simulator.seed = 5  # MuJoCo Playground
    with pytest.warns(RecurlWarning, match=r"Simulator has no seed\(\): its episodes don't depend on the seed"):
        env.reset(seed=4)


def test_a_simulator_that_resets_itself_is_reset_once():
    class Endless(Simulator):
        reset = None

    env = VecTensorEnv(Endless())
    root = env.reset()
    env.step(still(root))
    with pytest.raises(UsageError, match=r"Endless has no reset\(\), so all rows can only be reset once"):
        env.reset()


def test_rows_that_are_not_done_are_reset_if_the_simulator_can():
    mask = torch.tensor([False, True, False, True])
    env = VecTensorEnv(Simulator())
    root = env.maybe_reset(env.carry(env.step(still(env.reset()))))
    with pytest.raises(UsageError, match=r"rows \[1, 3\] to reset are not done: give it a method reset_idx"):
        env.reset(root.set("_reset", mask))

    def through(simulator):
        simulator.reset_idx = lambda ids: simulator._reset_rows(torch.isin(torch.arange(ROWS), ids))

    def inside(simulator):  # Isaac Lab, mjlab
        def reset(seed=None, env_ids=None):
            simulator._reset_rows(torch.isin(torch.arange(ROWS), env_ids))

        simulator.unwrapped = SimpleNamespace(reset=reset)

    for able in (through, inside):
        simulator = Simulator()
        able(simulator)
        env = VecTensorEnv(simulator)
        root = env.maybe_reset(env.carry(env.step(still(env.reset()))))
        root = env.reset(root.set("_reset", mask))
        assert root["policy"].tolist() == [[1, 1], [0, 2], [1, 1], [0, 2]]
        assert env.step(still(root))["next", "policy"][:, 0].tolist() == [1, 1, 2, 1]
        # A transform that cuts episodes: its rows are reset, those of the simulator not again.
        simulator = Simulator()
        able(simulator)
        cut = VecTensorEnv(simulator).append_transform(StepCounter(max_steps=3))
        seen = rolled(cut, 6)
        assert seen["policy"][:, :, 0].tolist() == [[0, 1, 0, 1, 0, 1], *[[0, 1, 2, 0, 1, 2]] * 3]
        assert simulator.resets.tolist() == [4, 3, 3, 3]
    assert env.reset(root.set("_reset", torch.ones(ROWS, dtype=torch.bool)))["policy"][:, 0].tolist() == [0] * ROWS


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [
        ({"action_low": -1, "action_high": 2.0}, [-1, -1], [2, 2]),
        ({"action_low": [-1, 0], "action_high": torch.tensor([1.0, 3.0])}, [-1, 0], [1, 3]),
    ],
)
def test_bounds_of_the_actions(bounds, low, high):
    simulator = Simulator()
    spec = VecTensorEnv(simulator, **bounds).action_spec_unbatched
    assert isinstance(spec, Bounded)
    assert (spec.low.tolist(), spec.high.tolist()) == (low, high)
    simulator.clip_actions = 4.0
    spec = VecTensorEnv(simulator).action_spec_unbatched
    assert (spec.low.tolist(), spec.high.tolist()) == ([-4, -4], [4, 4])
    assert VecTensorEnv(simulator, **bounds).action_spec_unbatched.low.tolist() == low


@pytest.mark.parametrize("bounds", [(1, 1), ([0, 0, 0], [1, 1, 1]), (0, float("nan"))])
def test_bounds_that_make_no_sense_are_refused(bounds):
    with pytest.raises(ArgumentError, match=r"numbers or of shape \[2\], the lower ones below"):
        VecTensorEnv(Simulator(), action_low=bounds[0], action_high=bounds[1])
    with pytest.raises(ArgumentError, match="must be given together"):
        VecTensorEnv(Simulator(), action_low=0)


def test_groups_may_be_left_out_and_nested():
    class Nested(Simulator):
        def get_observations(self):
            groups = super().get_observations()
            parts = {"scan": torch.zeros(ROWS, 3, 3, dtype=torch.uint8), "contact": torch.zeros(ROWS, dtype=torch.bool)}
            return TensorDict({**groups, "extra": parts}, batch_size=[])  # as in MuJoCo Playground

    env = VecTensorEnv(Nested(), drop_observations=["critic", "extra.scan"])
    assert set(env.observation_spec.keys(True, True)) == {"policy", ("extra", "contact")}
    assert rolled(env)["next", "extra", "contact"].dtype == torch.bool
    assert VecTensorEnv(Nested()).observation_spec["extra", "scan"].dtype == torch.uint8
    check_env_specs(VecTensorEnv(Nested()))
    with pytest.raises(ArgumentError, match="has no observation 'critics' to drop, it has policy, critic"):
        VecTensorEnv(Simulator(), drop_observations=["critics"])
    with pytest.raises(ArgumentError, match="An observation of Simulator must be left, it has policy, critic"):
        VecTensorEnv(Simulator(), drop_observations=["critic", "policy"])


def test_extras_are_kept():
    env = VecTensorEnv(Simulator())
    env.step(still(env.reset()))
    assert env.extras["log"]["/length"] == 1.0


def test_what_is_not_of_the_protocol_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"SimpleNamespace lacks num_actions, get_observations, step: wrap it"):
        VecTensorEnv(SimpleNamespace(num_envs=1, device="cpu"))
    with pytest.raises(ArgumentError, match="num_actions must be an integer"):
        VecTensorEnv(SimpleNamespace(**{**dict.fromkeys(("step", "get_observations")), **COUNTS, "num_actions": None}))


COUNTS = {"num_envs": 1, "device": "cpu"}


def changed(simulator, **results):
    """Return an environment after its first reset, the next step of which returns ``results`` instead."""
    env = VecTensorEnv(simulator)
    root, step = still(env.reset()), simulator.step

    def returning(actions):
        names = ("observations", "rewards", "dones", "extras")
        found = dict(zip(names, step(actions), strict=True)) | results
        return tuple(found.values())

    simulator.step = returning
    return env, root


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (
            {"observations": {"policy": torch.zeros(ROWS, 2)}},
            r"must have the groups \['policy', 'critic'\] of the first",
        ),
        ({"observations": torch.zeros(ROWS, 2)}, r"groups \['policy', 'critic'\] of the first ones, got \['policy'\]"),
        (
            {"observations": {"policy": torch.zeros(ROWS, 3), "critic": torch.zeros(ROWS, 1)}},
            r"The observation 'policy' of simulator must have shape \[4, 2\], got \[4, 3\]",
        ),
        ({"rewards": torch.zeros(ROWS, 2)}, r"rewards of Simulator must have shape \[4\], got \[4, 2\]"),
        ({"dones": torch.zeros(3)}, r"dones of Simulator must have shape \[4\], got \[3\]"),
        ({"extras": {"time_outs": torch.zeros(())}}, r"time_outs of Simulator must have shape \[4\], got \[\]"),
        ({"extras": {"final_obs": torch.zeros(ROWS, 2)}}, r"in extras\['final_obs'\] must have the groups"),
        ({"rewards": "high"}, "rewards of Simulator must be a tensor, or an array of NumPy, .* got str"),
        ({"more": None}, "Simulator.step must return observations, rewards, dones, and extras; got 5 values"),
    ],
)
def test_results_that_make_no_sense_are_refused(results, message):
    env, root = changed(Simulator(), **results)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        env.step(root)


@pytest.mark.parametrize("actions", [torch.zeros(ROWS), torch.zeros(ROWS, 2, dtype=torch.long)])
def test_actions_that_do_not_fit_are_refused(actions):
    env = VecTensorEnv(Simulator())
    with pytest.raises(ArgumentError, match=r"must be floating-point numbers of shape \[4, 2\], got torch"):
        env.step(env.reset().set("action", actions))


class Saving(Simulator):
    def get_state(self):
        return {"lengths": self.episode_length_buf.clone(), "episodes": self.episodes.clone()}

    def set_state(self, state):
        self.episode_length_buf[:], self.episodes[:] = state["lengths"], state["episodes"]


def test_states_are_saved_if_the_simulator_can():
    collectors = [Collector(VecTensorEnv(Saving()), still, frames_per_batch=ROWS * 3) for _ in range(2)]
    next(iter(collectors[0]))
    collectors[1].load_state_dict(collectors[0].state_dict())
    one, other = (next(iter(collector)) for collector in collectors)
    for key in ("policy", ("next", "policy"), ("next", "done")):
        assert torch.equal(one[key], other[key])
    env = VecTensorEnv(Simulator())
    assert not env.can_save_state
    assert env.state_obstacle == "the simulator Simulator has no get_state() and set_state()"
    with pytest.raises(UnsupportedError, match="can't save its state: the simulator Simulator has no get_state"):
        env.get_state()
    with pytest.raises(UsageError, match="before the first reset"):
        VecTensorEnv(Saving()).get_state()
    with pytest.raises(ArgumentError, match="restores only states saved by a VecTensorEnv"):
        VecTensorEnv(Saving()).set_state({})


def test_closing_closes_the_simulator():
    closed = []
    simulator = Simulator()
    simulator.close = lambda: closed.append(True)
    with VecTensorEnv(simulator):
        pass
    assert closed == [True]


@pytest.mark.slow
@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize("source", ["object", "function"])
def test_a_run_trains_on_it(tmp_path, source):
    made = VecTensorEnv(Simulator())
    env = made if source == "object" else partial(VecTensorEnv, Simulator())
    options = {"num_envs": ROWS, "rollout_steps": 8, "total_steps": 96, "hidden_size": 8}
    config, folder = PPOConfig(env=env, **options), RunFolder(tmp_path / "run", pytest.fail)
    folder.create(config)
    trainer = Trainer(config, folder, console=Console(file=io.StringIO()))
    trainer.run()
    trainer.close()
    assert len(folder.metrics.read_text().splitlines()) == 1 + 3
    _, agent = load_agent(folder, env=partial(VecTensorEnv, Simulator()))
    with VecTensorEnv(Simulator(), policy=agent.policy) as fresh:
        actions = rolled(fresh, 4, agent.policy)["action"]
    assert actions.shape == (ROWS, 4, 2)
