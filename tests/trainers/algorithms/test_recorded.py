"""Behavioral cloning: episodes saved and read, played as environments, learned; bad input."""

import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from recurl.cli import main
from recurl.core.errors import ArgumentError, MissingDependencyError, RecurlWarning, UnsupportedError
from recurl.core.keys import DONE_KEYS
from recurl.core.specs import Composite
from recurl.data.replay_buffers.folders import load_folder
from recurl.envs import GymEnv
from recurl.trainers import ALGORITHMS, PPOConfig, RunFolder, evaluate_run, load, make_env
from recurl.trainers.algorithms.configs import DistillConfig
from recurl.trainers.algorithms.recorded import read_episodes
from tests.envs.masked import ACTION_SPACES
from tests.trainers.run.test_trainer import differing, final_state, metrics, train
from tests.trainers.test_actions import ANY, MASKED
from tests.trainers.test_critic_observations import BOTH, SEEN, Masked

pytestmark = pytest.mark.usefixtures("no_curves")

MAZE = "recurl/TMaze-v0"


def episode(observation, action, **more):
    """Return an episode that ends with its last step."""
    steps = len(action)
    after = {"terminated": torch.arange(steps) == steps - 1, "reward": torch.arange(steps).float(), **more}
    return TensorDict({"observation": observation, "action": action, "next": after}, [steps])


def counted(lengths):
    """Return episodes of these lengths in CartPole, whose observations are numbers of episode and step."""
    parts = [torch.tensor([[number, step, 0, 0] for step in range(n)]).float() for number, n in enumerate(lengths)]
    return torch.cat([episode(part, (part[:, 0] + part[:, 1]).long() % 2) for part in parts])


def saved(data, folder):
    data.memmap(folder)
    return str(folder)


def cloning(source, env="CartPole-v1", **more):
    small = {"num_envs": 4, "rollout_steps": 16, "total_steps": 256, "hidden_size": 8, "cell": "gru"}
    own = {"sequence_length": 8, "minibatches": 2, "epochs": 1, "checkpoint_every": 2, "eval_episodes": 2}
    return DistillConfig(episodes=str(source), **{"env": env, **small, **own, **more})


def learner_of(config):
    return ALGORITHMS["distill"].learner(config)


def expert(folder, episodes=200, env=BOTH):
    """Save the episodes of a controller that sees the velocity; half of them are cut."""
    found = []
    generator = np.random.default_rng(0)
    world = Masked()
    for number in range(episodes):
        seen, _ = world.reset(seed=number)
        steps = []
        for _ in range(11 if number % 2 else int(generator.integers(3, 11))):
            action = np.clip(-0.8 * seen["seen"][:1] - 1.5 * seen["hidden"][:1], -1, 1).astype(np.float32)
            after, reward, *_ = world.step(action)
            steps.append({**{k: torch.tensor(v) for k, v in seen.items()}, "action": torch.tensor(action),
                          "next": {"reward": torch.tensor([reward]).float()}})  # fmt: skip
            seen = after
        part = torch.stack([TensorDict(step, []) for step in steps])
        part["next", "truncated"] = torch.arange(len(part)) == len(part) - 1
        found.append(part)
    return saved(torch.cat(found), folder)


def test_rows_play_whole_episodes_from_their_first_steps(tmp_path):
    """Every recorded step is shown with its own action, in order; memories are reset where an episode begins."""
    lengths = [3, 1, 7, 40, 2]
    learner = learner_of(cloning(saved(counted(lengths), tmp_path / "episodes"), rollout_steps=64))
    batches = [learner.collect() for _ in range(3)]
    batch = torch.cat(batches, 1)
    number, step = batch["observation"][..., 0].long(), batch["observation"][..., 1].long()
    assert set(number.unique().tolist()) == set(range(5))
    begins = batch["is_init"].squeeze(-1)
    assert torch.equal(begins, step == 0)
    assert torch.equal(batch["action"], (number + step) % 2)
    assert torch.equal(batch["action"], batch["teacher_action"])
    last = step == torch.tensor(lengths)[number] - 1
    assert torch.equal(batch["next", "done"].squeeze(-1), last)
    assert torch.equal(batch["next", "terminated"], batch["next", "done"])
    assert torch.equal(batch["next", "reward"].squeeze(-1), step.float())
    inside = ~begins[:, 1:]
    assert torch.equal(step[:, 1:][inside], step[:, :-1][inside] + 1)
    assert torch.equal(number[:, 1:][inside], number[:, :-1][inside])
    assert torch.equal(batch["collector", "traj_steps"], step)
    assert (batch["state_h"][begins] == 0).all()
    carried = batch["state_h"][:, 1:][inside]
    assert torch.equal(carried, batch["next", "state_h"][:, :-1][inside])
    assert (carried != 0).any()


def test_the_student_sees_neither_label_nor_what_is_dropped(tmp_path):
    config = cloning(expert(tmp_path / "episodes", 8), BOTH, drop_observations=("hidden",), previous_action=True)
    learner = learner_of(config)
    assert learner.agent.observations.keys == ["previous_action", "seen"]
    assert "teacher_action" not in learner.agent.actor.in_keys
    batch = learner.collect()
    inside = ~batch["is_init"][:, 1:, 0]
    assert torch.equal(batch["previous_action"][:, 1:][inside], batch["action"][:, :-1][inside])  # the recorded one
    before = {name: value.clone() for name, value in learner.agent.named_parameters()}
    learner.learn(batch)
    changed = {name for name, value in learner.agent.named_parameters() if not torch.equal(value, before[name])}
    assert changed == before.keys()


def test_saved_episodes_are_those_of_the_evaluation(tmp_path):
    config = PPOConfig(env="CartPole-v1", num_envs=4, rollout_steps=16, total_steps=256, hidden_size=8, cell="gru")
    train(config, tmp_path / "run")
    found = evaluate_run(RunFolder(tmp_path / "run"), episodes=7, save_episodes=tmp_path / "episodes")
    data, facts = load_folder(tmp_path / "episodes")
    assert facts == {"episodes": 7}
    assert {*data.keys(True, True)} == {"observation", "action", *(("next", key) for key in (*DONE_KEYS, "reward"))}
    done = data["next", "done"].squeeze(-1)
    assert int(done.sum()) == 7
    assert bool(done[-1])
    number = torch.cat((torch.zeros(1, dtype=torch.long), done.cumsum(0)[:-1]))
    returns = torch.zeros(7).index_add_(0, number, data["next", "reward"].squeeze(-1))
    assert sorted(returns.tolist()) == sorted(found.returns)
    policy, state = load(tmp_path / "run"), None
    for step, begins in zip(data, [True, *done.tolist()], strict=False):
        action, state = policy.predict(step["observation"].numpy(), state, begins)
        assert int(action) == int(step["action"])
    with pytest.raises(ArgumentError, match="new or an empty folder"):
        evaluate_run(RunFolder(tmp_path / "run"), episodes=1, save_episodes=tmp_path / "episodes")


def test_a_rollout_is_a_folder_of_episodes(tmp_path):
    """Its actions are one-hot, and its rows are cut where they end."""
    env = GymEnv("CartPole-v1", num_envs=3)
    batch = env.rollout(30, break_when_any_done=False)
    steps, ends = read_episodes(saved(batch, tmp_path / "rollout"), make_env(PPOConfig(env="CartPole-v1"), 1))
    assert torch.equal(steps["teacher_action"], batch["action"].argmax(-1).reshape(-1))
    assert torch.equal(steps["observation"], batch["observation"].reshape(-1, 4))
    cut = torch.arange(90).reshape(3, 30)[:, -1]
    assert ends[cut].all()
    assert torch.equal(steps["next", "truncated"] | steps["next", "terminated"], steps["next", "done"])
    assert torch.equal(steps["next", "terminated"], batch["next", "terminated"].reshape(-1, 1))


def test_episodes_without_their_beginning_are_left_out(tmp_path):
    data = counted([4, 5])
    data["is_init"] = torch.tensor([False, False, False, False, True, False, False, False, False])
    env = make_env(PPOConfig(env="CartPole-v1"), 1)
    with pytest.warns(RecurlWarning, match="1 of the 2 episodes .* begin in the middle"):
        steps, ends = read_episodes(saved(data, tmp_path / "some"), env)
    assert steps["observation"][:, 0].tolist() == [1.0] * 5
    assert ends.tolist() == [False] * 4 + [True]
    with pytest.raises(ArgumentError, match="all begin in the middle"):
        read_episodes(saved(data[:4], tmp_path / "none"), env)


@pytest.mark.parametrize("action", ACTION_SPACES)
def test_actions_of_every_kind(tmp_path, action):
    config = cloning(tmp_path / "episodes", ANY, env_kwargs=(f"kind={action}",))
    with make_env(config, 3) as env:
        spec = env.action_spec_unbatched
        batch = env.rollout(30, break_when_any_done=False)
    saved(batch, tmp_path / "episodes")
    if isinstance(spec, Composite):
        with pytest.raises(UnsupportedError, match="actions of one part"):
            learner_of(config)
        return
    learner = learner_of(config)
    found = learner.collect()
    assert torch.equal(found["action"], found["teacher_action"])
    kinds = {tuple(row.reshape(-1).tolist()) for row in batch["action"].flatten(0, 1)}
    assert {tuple(row.reshape(-1).tolist()) for row in found["action"].flatten(0, 1)} <= kinds
    assert np.isfinite(learner.learn(found)["loss"])


def test_masks_are_recorded(tmp_path):
    config = cloning(tmp_path / "episodes", MASKED)
    with make_env(config, 3) as env:
        batch = env.rollout(30, break_when_any_done=False)
    saved(batch, tmp_path / "episodes")
    learner = learner_of(config)
    assert np.isfinite(learner.learn(learner.collect())["loss"])
    batch["action_mask"][1, 4] = torch.arange(batch["action_mask"].shape[-1]) != batch["action"][1, 4]
    with pytest.raises(ArgumentError, match=r"must allow its action, but doesn't in 1 steps"):
        learner_of(cloning(saved(batch, tmp_path / "wrong"), MASKED))


@pytest.mark.usefixtures("shared_interpreter")
def test_resumed_equals_uninterrupted(tmp_path):
    config = cloning(saved(counted([3, 9, 20]), tmp_path / "episodes"))
    train(config, tmp_path / "whole")
    train(config, tmp_path / "half", stop_after=2)
    train(config, tmp_path / "half", resume=True)
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")
    assert differing(final_state(tmp_path / "half"), final_state(tmp_path / "whole")) == []
    state = learner_of(config)
    state.collect()
    other = learner_of(cloning(saved(counted([3, 9, 21]), tmp_path / "others")))
    with pytest.raises(ArgumentError, match="episodes that it began with, 32 steps, got 33"):
        other.load_state_dict(state.state_dict())


class Paced(gym.Env):
    """Choices that don't begin at 0, in observations and actions, nested, with a mask-free Dict."""

    observation_space = spaces.Dict(
        {
            "where": spaces.Discrete(3, start=5),
            "inner": spaces.Dict({"bits": spaces.MultiBinary(2), "many": spaces.MultiDiscrete([2, 3])}),
            "depth": spaces.Box(0, 1, (), np.float64),
        }
    )
    action_space = spaces.Discrete(2, start=7)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


gym.register("tests/Paced-v0", Paced, max_episode_steps=5)


def minari_of(space, episodes):
    """Return a stand-in for the module ``minari`` with one data set, named ``here``."""

    def load_dataset(name):
        if name != "here":
            raise FileNotFoundError(f"Dataset {name} not found locally")
        return SimpleNamespace(observation_space=space, iterate_episodes=lambda: iter(episodes))

    return SimpleNamespace(load_dataset=load_dataset)


def minari_episode(space, actions):
    """Return an episode as Minari has it, with an observation more than actions."""
    seen = [space.sample() for _ in range(len(actions) + 1)]
    stacked = gym.vector.utils.concatenate(space, seen, gym.vector.utils.create_empty_array(space, len(seen)))
    ends = np.arange(len(actions)) == len(actions) - 1
    return SimpleNamespace(observations=stacked, actions=actions, rewards=np.ones(len(actions)),
                           terminations=ends, truncations=np.zeros_like(ends)), seen  # fmt: skip


def test_a_minari_data_set(tmp_path, monkeypatch):
    space = Paced.observation_space
    space.seed(0)
    pairs = [minari_episode(space, np.array(actions)) for actions in ([7, 8, 8], [8], [7, 7])]
    monkeypatch.setitem(sys.modules, "minari", minari_of(space, [one for one, _ in pairs]))
    config = cloning("minari:here", "tests/Paced-v0")
    env = make_env(config, None)
    steps, ends = read_episodes("minari:here", env)
    assert ends.tolist() == [False, False, True, True, False, True]
    assert steps["teacher_action"].tolist() == [0, 1, 1, 1, 0, 0]
    read = env.base_env.readers[0] if hasattr(env, "base_env") else env.readers[0]
    for step, raw in zip(steps, [one for _, seen in pairs for one in seen[:-1]], strict=True):
        for key, value in read.read(raw).items():
            assert torch.equal(step[key], value), key
    learner = learner_of(config)
    assert 0 <= learner.learn(learner.collect())["agreement"] <= 1
    with pytest.raises(ArgumentError, match=r"not found locally .* minari download absent gets it"):
        read_episodes("minari:absent", env)
    with pytest.raises(ArgumentError, match=r"has the observations Dict.* and the environment Box"):
        learner_of(cloning("minari:here"))
    monkeypatch.setitem(sys.modules, "minari", minari_of(space, []))
    with pytest.raises(ArgumentError, match="has no episodes"):
        read_episodes("minari:here", env)
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(MissingDependencyError, match=r"needs Minari: pip install 'minari\[hdf5\]'"):
        read_episodes("minari:here", env)


def test_a_minari_data_set_needs_spaces(monkeypatch):
    from recurl.envs import VecTensorEnv
    from tests.envs.test_vec_tensor_env import Simulator

    monkeypatch.setitem(sys.modules, "minari", minari_of(None, []))
    with pytest.raises(UnsupportedError, match="needs an environment with Gymnasium spaces"):
        read_episodes("minari:here", VecTensorEnv(Simulator()))


def changed(name, value):
    """Return episodes of CartPole in which an entry has another value, or is missing."""
    data = counted([3, 4])
    return data.exclude(name) if value is None else data.set(name, value)


OUTSIDE = [
    (changed("observation", None), "environment observes observation, which the episodes in .* lack: they have other"),
    (changed("observation", torch.zeros(7, 5)), r"has observation of shape \[4\].* have it of shape \[5\]"),
    (changed("observation", torch.full((7, 4), torch.nan)), "observation must be finite"),
    (changed("action", None), "must have an action"),
    (changed("action", torch.full((7,), 2)), r"must be in the environment's action space.* from 2 to 2"),
    (changed("action", torch.zeros(7)), "has action of shape .* dtype torch.int64.* dtype torch.float32"),
    (changed("action", torch.zeros(7, 2).long()), r"has action of shape \[\].* have it of shape \[2\]"),
    (changed("next", None), "must have a flag under 'next'"),
    (changed(("next", "terminated"), torch.zeros(7, 2)), r"terminated of recorded episodes must have shape \[7\]"),
    (counted([3])[:0], "has no episodes"),
    (TensorDict({"observation": torch.zeros(4)}, []), "has no episodes"),
]


@pytest.mark.parametrize(("data", "message"), OUTSIDE)
def test_episodes_that_do_not_fit(tmp_path, data, message):
    data = data.set("other", torch.zeros(*data.batch_size, 1))
    with pytest.raises(ArgumentError, match=message):
        learner_of(cloning(saved(data, tmp_path / "episodes")))


def test_actions_outside_a_box(tmp_path):
    source = expert(tmp_path / "episodes", 4)
    data = load_folder(tmp_path / "episodes")[0].clone()
    data["action"][3] = 1.5
    with pytest.raises(ArgumentError, match=r"must be in the environment's action space.* to 1\.5: rescale them"):
        learner_of(cloning(saved(data, tmp_path / "others"), BOTH))
    learner_of(cloning(source, BOTH)).close()


def test_bad_options(tmp_path, capsys):
    with pytest.raises(ArgumentError, match=r"can't be read: .*No such file"):
        learner_of(cloning(tmp_path / "nothing"))
    with pytest.raises(ArgumentError, match="needs a teacher or recorded episodes"):
        cloning("some", teacher="other")
    with pytest.raises(ArgumentError, match=r"no teacher, which --teacher-observations, --teacher-share need"):
        cloning("some", teacher_observations=("hidden",), teacher_share=0.5)
    with pytest.raises(ArgumentError, match="use --stop-eval-return"):
        cloning("some", stop_return=1.0)
    assert main(["distill", "--env", MAZE]) == 2
    assert "recurl distill --episodes DIR --env ID" in capsys.readouterr().err


def maze_episodes(folder, lengths=(3, 4, 5, 6, 7, 8)):
    """Save an expert's episodes in corridors of several lengths."""
    parts = []
    for length in lengths:
        for cue in (0, 1):
            seen = torch.zeros(length + 1, 4)
            seen[:-1, 2] = seen[0, cue] = seen[-1, 3] = 1
            parts.append(episode(seen, torch.tensor([0] * length + [1 + cue])))
    return saved(torch.cat(parts), folder)


@pytest.mark.learning
@pytest.mark.parametrize(("cell", "low", "high"), [("gru", 1.0, 1.0), ("s5", 1.0, 1.0), ("none", 0.2, 0.8)])
def test_a_clone_recalls_what_its_expert_does(tmp_path, cell, low, high):
    """The expert turns as a cue told it, episodes of 4 to 9 steps ago: with a memory, so does its clone."""
    source = maze_episodes(tmp_path / "episodes")
    status = main(["distill", "--episodes", source, "--env", MAZE, "--env-kwargs", "corridor_length=6", "--cell", cell,
                   "--hidden-size", "32", "--total-steps", "40000", "--logger", "none", "--eval-episodes", "50",
                   "--run-dir", str(tmp_path / "clone")])  # fmt: skip
    assert not status
    assert low <= evaluate_run(RunFolder(tmp_path / "clone"), episodes=50).mean_return <= high


@pytest.mark.learning
def test_a_clone_of_a_controller_that_saw_more(tmp_path):
    """The velocity, which the expert sees, is inferred from positions: the clone's return is nearly the expert's."""
    source = expert(tmp_path / "episodes")
    data = load_folder(tmp_path / "episodes")[0]
    whole = data["next", "reward"][data["next", "truncated"].cumsum(0).reshape(-1) % 2 == 1]
    config = cloning(source, SEEN, num_envs=16, rollout_steps=32, sequence_length=32,
                     hidden_size=32, total_steps=60_000, epochs=4, minibatches=4)  # fmt: skip
    train(config, tmp_path / "clone")
    best = float(whole.sum()) / 100
    reached = evaluate_run(RunFolder(tmp_path / "clone"), episodes=100).mean_return
    assert reached > best - 0.15, (reached, best)
