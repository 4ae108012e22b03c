import io

import pytest
import torch
from rich.console import Console
from tensordict.nn import TensorDictModule

from recurl.errors import ArgumentError
from recurl.trainers import Evaluation, PPOConfig, RunFolder, Trainer, evaluate_policy, evaluate_run, make_env

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


def test_nothing_to_evaluate(tmp_path):
    with pytest.raises(ArgumentError, match="--episodes must be positive, got 0"):
        evaluate_policy(TensorDictModule(lambda x: x, ["a"], ["b"]), make_env(CONFIG, 1), episodes=0)
    with pytest.raises(ArgumentError, match="--episodes must be positive, got -1"):
        evaluate_run(RunFolder(tmp_path), episodes=-1)
    with pytest.raises(ArgumentError, match="holds no run"):
        evaluate_run(RunFolder(tmp_path), episodes=1)


def test_reads_like_a_sentence():
    assert str(Evaluation([0.5], [3])).startswith("Greedy evaluation over 1 episodes: return 0.5 ")
