"""A policy with memory learns what a memoryless one can't; the larger tasks are in benchmarks/bench_learning.py."""

import io

import pytest
from rich.console import Console

from recurl.envs.tasks import TASKS
from recurl.trainers import PPOConfig, RunFolder, Trainer, evaluate_run

pytestmark = pytest.mark.learning

REPEAT = {"env": "recurl/RepeatPrevious-v0", "env_kwargs": ("k=1", "num_symbols=2", "episode_length=16"), "gamma": 0.3}
TMAZE = {"env": "recurl/TMaze-v0", "env_kwargs": ("corridor_length=3",)}


def greedy_return(path, **options):
    config = PPOConfig(
        **{
            "hidden_size": 16,
            "num_envs": 16,
            "rollout_steps": 32,
            "total_steps": 16_384,
            "learning_rate": 1e-2,
            **options,
        }
    )
    folder = RunFolder(path)
    folder.create(config)
    trainer = Trainer(config, folder, console=Console(file=io.StringIO()))
    trainer.run()
    trainer.close()
    return evaluate_run(folder, episodes=200).mean_return


@pytest.mark.parametrize(
    ("task", "cell", "shared"),
    [(REPEAT, "lstm", True), (REPEAT, "gru", False), (TMAZE, "lstm", False), (TMAZE, "gru", True)],
)
def test_with_memory_the_optimum_is_reached(tmp_path, task, cell, shared):
    assert greedy_return(tmp_path, **task, cell=cell, shared_trunk=shared, stop_return=0.98) >= 0.95


@pytest.mark.parametrize("task", [REPEAT, TMAZE])
def test_without_memory_the_bound_holds(tmp_path, task):
    config = PPOConfig(**task)
    bound = TASKS[config.env].memoryless_return(**config.env_arguments)
    # 200 episodes: the standard error is at most 0.035.
    assert greedy_return(tmp_path, **task, cell="none") <= bound + 0.12


def test_continuous_actions_are_learned(tmp_path):
    shape = {"num_envs": 8, "rollout_steps": 200, "sequence_length": 25, "minibatches": 8, "total_steps": 48_000}
    # A random policy gets about -1200, one that swings up and stays about -150.
    assert greedy_return(tmp_path, env="Pendulum-v1", gamma=0.9, learning_rate=3e-3, **shape) > -800
