import dataclasses
import io
import json

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from rich.console import Console
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.core.errors import ArgumentError, NonFiniteError
from recurl.envs import GymWrapper
from recurl.modules import CellModule
from recurl.recurrence import Cell
from recurl.trainers import (
    DQNConfig,
    Evaluation,
    PPOConfig,
    RunFolder,
    Trainer,
    evaluate_policy,
    evaluate_run,
    make_env,
)
from recurl.trainers.run.evaluate import bootstrap_interval
from tests.envs.small import CountEnv
from tests.trainers.small_runs import trained

CONFIG = PPOConfig(
    env="recurl/TMaze-v0",
    env_kwargs=("corridor_length=2", "max_episode_steps=6"),
    hidden_size=8,
    num_envs=4,
    rollout_steps=16,
    sequence_length=8,
    total_steps=64,
)


@pytest.mark.parametrize("episodes", [1, 3, 10])
def test_every_row_plays_its_share(episodes):
    forward = TensorDictModule(lambda x: torch.zeros(x.shape[:-1], dtype=torch.int64), ["observation"], ["action"])
    env = make_env(CONFIG, 4)
    env.set_seed(0)
    evaluation = evaluate_policy(forward, env, episodes=episodes)
    # Two free steps to the junction, then the wall until the limit.
    assert evaluation.lengths == [6] * episodes
    assert evaluation.returns == pytest.approx([-0.4] * episodes)


class Growing(Cell):
    """Cell whose state overflows, and whose features are 0."""

    def parameters(self, sizes):
        return {"weight": (sizes.hidden_size, sizes.input_size)}

    def step(self, x, states, weight):
        h = 1e20 * (states[0] + 1)
        return x @ weight.t() * 0, (h,)


def test_an_overflowing_memory_is_told_from_a_faulty_environment():
    memory = CellModule(Growing(), 4, 8, in_key="observation", out_key="memory")
    forward = TensorDictModule(lambda x: torch.zeros(x.shape[:-1], dtype=torch.int64), ["memory"], ["action"])
    policy = TensorDictSequential(memory, forward)
    with (
        make_env(CONFIG, 4, policy=policy) as env,
        pytest.raises(
            NonFiniteError, match=r"The policy must .*, but a hidden state at step 1 of the evaluation isn't: train it"
        ),
    ):
        evaluate_policy(policy, env, episodes=4)


def test_a_run_is_evaluated_greedily_and_repeatably(tmp_path):
    folder = RunFolder(tmp_path)
    folder.create(CONFIG)
    trainer = Trainer(CONFIG, folder, console=Console(file=io.StringIO()))
    trainer.run()
    trainer.close()
    first, again = evaluate_run(folder, episodes=7), evaluate_run(folder, episodes=7)
    assert len(first.returns) == 7
    assert first == again
    assert evaluate_run(folder, episodes=7, seed=3) == evaluate_run(folder, episodes=7, seed=3)


def test_short_episodes_do_not_weigh_more():
    env = make_env(PPOConfig(env="CartPole-v1"), 2)
    env.set_seed(0)
    one_way = TensorDictModule(lambda x: (x[..., 0] > 100).long(), ["observation"], ["action"])
    evaluation = evaluate_policy(one_way, env, episodes=4)
    assert len(evaluation.lengths) == 4
    assert evaluation.returns == [float(length) for length in evaluation.lengths]


def test_no_row_plays_more_than_its_share():
    vector = SyncVectorEnv([lambda n=n: CountEnv(length=n) for n in (1, 3)], autoreset_mode=AutoresetMode.DISABLED)
    stay = TensorDictModule(lambda x: torch.zeros(x.shape[:-1], dtype=torch.int64), ["observation"], ["action"])
    assert sorted(evaluate_policy(stay, GymWrapper(vector), episodes=4).lengths) == [1, 1, 3, 3]


def test_episodes_that_never_end_are_cut_and_counted():
    """Always left or always right: two of the four rows never reach an end of the corridor."""
    turn = TensorDictModule(lambda x: torch.ones(x.shape[:-1], dtype=torch.int64), ["observation"], ["action"])
    env = make_env(dataclasses.replace(CONFIG, env_kwargs=("corridor_length=2", "max_episode_steps=1000000")), 4)
    env.set_seed(0)
    seen = []
    evaluation = evaluate_policy(turn, env, episodes=6, max_steps=50, progress=lambda *numbers: seen.append(numbers))
    assert evaluation.lengths == [50] * 6
    assert (evaluation.cut, evaluation.max_steps) == (6, 50)
    assert str(evaluation).endswith(", length 50; 6 of 6 episodes were cut after 50 steps")
    assert seen[:2] == [(0, 4), (0, 8)]
    assert seen[-1] == (6, 400)


def test_an_episode_that_ends_at_the_bound_is_not_cut():
    policy = TensorDictModule(lambda x: torch.zeros(x.shape[:-1], dtype=torch.int64), ["observation"], ["action"])
    env = make_env(PPOConfig(env="CartPole-v1"), 1)
    lengths = []
    for bound in (1000, None):
        env.set_seed(0)
        bound = lengths[0] if bound is None else bound
        evaluation = evaluate_policy(policy, env, episodes=1, max_steps=bound)
        assert evaluation.cut == 0
        lengths += evaluation.lengths
    assert lengths[0] == lengths[1]
    assert "cut" not in str(evaluation)


def test_a_run_has_its_own_step_limit(tmp_path):
    folder = RunFolder(tmp_path)
    config = dataclasses.replace(CONFIG, env_kwargs=("corridor_length=2", "max_episode_steps=60"), eval_max_steps=7)
    folder.create(config)
    trainer = Trainer(config, folder, console=Console(file=io.StringIO()))
    trainer.run()
    trainer.close()
    assert max(evaluate_run(folder, episodes=7).lengths) <= 7
    assert evaluate_run(folder, episodes=7, max_steps=3).max_steps == 3


def test_nothing_to_evaluate(tmp_path):
    with pytest.raises(ArgumentError, match="--episodes must be positive, got 0"):
        evaluate_policy(TensorDictModule(lambda x: x, ["a"], ["b"]), make_env(CONFIG, 1), episodes=0)
    with pytest.raises(ArgumentError, match="--episodes must be positive, got -1"):
        evaluate_run(RunFolder(tmp_path), episodes=-1)
    with pytest.raises(ArgumentError, match="--max-steps must be positive, got 0"):
        evaluate_policy(TensorDictModule(lambda x: x, ["a"], ["b"]), make_env(CONFIG, 1), episodes=1, max_steps=0)
    with pytest.raises(ArgumentError, match="holds no run"):
        evaluate_run(RunFolder(tmp_path), episodes=1)


@pytest.mark.slow
def test_intervals_are_bootstrapped():
    draw = np.random.default_rng(1)
    covered = 0
    for _ in range(100):
        values = draw.normal(3.0, 2.0, 40)
        low, high = bootstrap_interval(values.tolist())
        covered += low <= 3.0 <= high
        assert high - low == pytest.approx(2 * 1.96 * values.std() / 40**0.5, rel=0.1)
    assert 88 <= covered <= 99
    assert bootstrap_interval([7.0]) == (7.0, 7.0)
    assert bootstrap_interval(list(range(20_000))) == pytest.approx((9920, 10080), abs=15)  # in chunks


def test_statistics_as_plain_values():
    found = json.loads(json.dumps(Evaluation([1.0, 3.0], [10, 20], deterministic=False).to_dict()))
    assert found["return"] == {"mean": 2.0, "interval": [1.0, 3.0], "std": 1.0, "min": 1.0, "max": 3.0}
    assert found["length"]["mean"] == 15
    assert (found["episodes"], found["returns"], found["lengths"]) == (2, [1.0, 3.0], [10, 20])
    assert (found["deterministic"], found["interval"]["confidence"]) == (False, 0.95)
    assert "bootstrap" in found["interval"]["method"]


@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig])
def test_stochastic_evaluations_draw_by_their_seed_alone(tmp_path, kind):
    options = {"shared_trunk": False} if kind is PPOConfig else {}
    folder = trained(tmp_path, kind, "recurl/RepeatPrevious-v0", options)
    before = torch.get_rng_state()
    first = evaluate_run(folder, episodes=3, seed=4, deterministic=False)
    again = evaluate_run(folder, episodes=3, seed=4, deterministic=False)
    assert first == again
    assert torch.equal(torch.get_rng_state(), before)
    assert first.returns != evaluate_run(folder, episodes=3, seed=4).returns
    assert str(first).startswith("Stochastic evaluation over 3 episodes: return ")


def test_reads_like_a_sentence():
    assert str(Evaluation([0.5], [3])).startswith("Greedy evaluation over 1 episodes: return 0.5 ")
