"""Memory is learned from batches used once: A2C, and IMPALA from batches of older weights."""

import io

import pytest
from rich.console import Console

from recurl.trainers import A2CConfig, ImpalaConfig, RunFolder, Trainer, evaluate_run

pytestmark = pytest.mark.learning

REPEAT = {"env": "recurl/RepeatPrevious-v0", "env_kwargs": ("k=1", "num_symbols=2", "episode_length=16"), "gamma": 0.3}
TMAZE = {"env": "recurl/TMaze-v0", "env_kwargs": ("corridor_length=3",)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (A2CConfig, {**REPEAT, "cell": "lstm"}),
        pytest.param(A2CConfig, {**TMAZE, "cell": "gru", "shared_trunk": False}, marks=pytest.mark.full),
        (ImpalaConfig, {**REPEAT, "cell": "gru", "overlap": True}),
        pytest.param(ImpalaConfig, {**TMAZE, "cell": "lstm", "clip_epsilon": 0.2}, marks=pytest.mark.full),
    ],
)
def test_with_memory_the_optimum_is_reached(tmp_path, kind, options):
    config = kind(
        hidden_size=16, total_steps=65_536, learning_rate=1e-2, entropy_coeff=0.01, stop_return=0.98, **options
    )
    folder = RunFolder(tmp_path)
    folder.create(config)
    trainer = Trainer(config, folder, console=Console(file=io.StringIO()))
    trainer.run()
    trainer.close()
    assert evaluate_run(folder, episodes=200).mean_return >= 0.95
