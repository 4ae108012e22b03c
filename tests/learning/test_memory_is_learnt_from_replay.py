"""Q-learning from replayed slices learns what needs memory; the larger tasks are in benchmarks/bench_learning.py."""

import io

import pytest
from rich.console import Console

from recurl.envs.tasks import TASKS
from recurl.trainers import DQNConfig, R2D2Config, RunFolder, SACConfig, Trainer, evaluate_run

pytestmark = pytest.mark.learning

REPEAT = {"env": "recurl/RepeatPrevious-v0", "env_kwargs": ("k=1", "num_symbols=2", "episode_length=16"), "gamma": 0.3}
TMAZE = {"env": "recurl/TMaze-v0", "env_kwargs": ("corridor_length=3",)}
SMALL = {
    "hidden_size": 16,
    "total_steps": 8_192,
    "learning_rate": 1e-2,
    "gradient_steps": 4,
    "head_width": 0,
    "normalize_observations": False,
    "learning_starts": 512,
    "slices": 16,
    "slice_length": 16,
}


def make(kind, **options):
    own = {"target_interval": 50, "value_rescaling": False} if issubclass(kind, DQNConfig) else {}
    return kind(**SMALL, **own, **({"burn_in": 2} if kind is R2D2Config else {}), **options)


def greedy_return(path, config):
    folder = RunFolder(path)
    folder.create(config)
    trainer = Trainer(config, folder, console=Console(file=io.StringIO()))
    trainer.run()
    trainer.close()
    return evaluate_run(folder, episodes=200).mean_return


@pytest.mark.parametrize(
    ("task", "kind", "cell"),
    [
        (REPEAT, DQNConfig, "gru"),
        pytest.param(REPEAT, R2D2Config, "lstm", marks=pytest.mark.full),
        (REPEAT, SACConfig, "gru"),
        pytest.param(TMAZE, DQNConfig, "lstm", marks=pytest.mark.full),
        (TMAZE, R2D2Config, "gru"),
    ],
)
def test_with_memory_the_optimum_is_reached(tmp_path, task, kind, cell):
    assert greedy_return(tmp_path, make(kind, **task, cell=cell)) >= 0.95


@pytest.mark.parametrize(("task", "kind"), [(REPEAT, R2D2Config), (TMAZE, DQNConfig)])
def test_without_memory_the_bound_holds(tmp_path, task, kind):
    config = make(kind, **task, cell="none")
    bound = TASKS[config.env].memoryless_return(**config.env_arguments)
    # 200 episodes: the standard error is at most 0.035.
    assert greedy_return(tmp_path, config) <= bound + 0.12
