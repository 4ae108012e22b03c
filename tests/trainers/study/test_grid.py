"""Jobs of a sweep: names, combinations, seeds, and options that can't be set."""

import pytest

from recurl.cli import sweep
from recurl.core.errors import ArgumentError
from recurl.trainers.study.grid import parse_settings

BASE = "ppo --run-dir out --env recurl/TMaze-v0"


def jobs(words):
    return sweep.read(words.split()).jobs


def test_every_combination_with_every_seed():
    found = jobs(f"{BASE} --seeds 2 --seed 7 --set cell=lstm,none learning_rate=1e-3,0.5 --threads 2 --jobs 3")
    assert [job.name for job in found[:3]] == [
        "cell=lstm,learning_rate=1e-3,seed=7",
        "cell=lstm,learning_rate=0.5,seed=7",
        "cell=none,learning_rate=1e-3,seed=7",
    ]
    assert len({job.name for job in found}) == len(found) == 8
    assert [job.config.seed for job in found] == [7] * 4 + [8] * 4
    assert {(job.config.cell, job.config.learning_rate) for job in found} == {
        (cell, rate) for cell in ("lstm", "none") for rate in (1e-3, 0.5)
    }
    assert {job.config.threads for job in found} == {2}


def test_without_a_grid_there_are_seeds():
    assert [job.name for job in jobs(f"{BASE} --seeds 3")] == ["seed=0", "seed=1", "seed=2"]


def test_all_kinds_of_options():
    words = "--set env=recurl/TMaze-v0,recurl/MaskedCartPole-v1 shared-trunk=true,false stop_return=None,1 logger=none"
    found = jobs(f"ppo --run-dir out {words}")
    assert len(found) == 8
    assert found[0].name == "env=TMaze-v0,shared_trunk=true,stop_return=None,logger=none,seed=0"
    assert {(job.config.shared_trunk, job.config.stop_return) for job in found} == {
        (shared, stop) for shared in (True, False) for stop in (None, 1.0)
    }
    assert jobs(f"{BASE} --set env_kwargs=corridor_length=3,corridor_length=5")[1].config.env_kwargs == (
        "corridor_length=5",
    )


def test_presets_and_files(tmp_path):
    assert jobs("--run-dir out --preset tmaze --set cell=lstm,gru")[1].config.total_steps == 100_000
    file = tmp_path / "run.toml"
    file.write_text("algorithm = 'r2d2'\nenv = 'recurl/TMaze-v0'\n")
    assert jobs(f"--run-dir out --config {file}")[0].config.algorithm == "r2d2"


def test_options_of_a_cell_may_hold_commas():
    found = jobs(f"{BASE} --set cell=gtrxl(window=8,heads=2),gru,mlstm(heads=2) gamma=0.5,0.9")
    cells = ["gtrxl(window=8,heads=2)"] * 2 + ["gru"] * 2 + ["mlstm(heads=2)"] * 2
    assert [job.config.cell for job in found] == cells
    assert found[0].name == "cell=gtrxl-window=8,heads=2-,gamma=0.5,seed=0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", r"Missing from recurl sweep: --run-dir"),
        ("--run-dir out", r"recurl sweep needs an algorithm \(ppo, dqn, r2d2"),
        ("pppo --run-dir out", r"There is no algorithm 'pppo': did you mean ppo\?"),
        (f"{BASE} --set celll=lstm", r"--set: ppo has no option 'celll'\. Did you mean cell\?"),
        (f"{BASE} --set cell", r"--set takes field=value,value such as cell=lstm,gru, got 'cell'"),
        (f"{BASE} --set cell=lstm,", r"--set takes field=value"),
        (f"{BASE} --set cell=lstm cell=gru", r"--set got cell twice"),
        (f"{BASE} --set cell=lstm,lstm", r"--set cell has a value twice"),
        (f"{BASE} --set cell=gruu", r"--cell: There is no cell 'gruu'\. Did you mean gru\?"),
        (f"{BASE} --set gamma=2", r"--gamma must lie between 0 and 1, got 2"),
        (f"{BASE} --set gamma=x", r"Error parsing --gamma"),
        (f"{BASE} --set shared_trunk=yes", r"--set shared_trunk must be true or false, got 'yes'"),
        (f"{BASE} --set seed=1,2", r"--set can't set seed: --seeds N"),
        (f"{BASE} --set env=a/B,c/B", r"two runs the folder name 'env=B,seed=0'"),
        (f"{BASE} --seeds 0", r"--seeds must be positive, got 0"),
        (f"{BASE} --gama 0.5", r"Unrecognized options: --gama, 0.5: did you mean --gamma\?"),
        (f"{BASE} --overwrite", r"recurl sweep takes neither --overwrite nor --save-config"),
        (f"{BASE} --set logger=wandbb", r"Did you mean wandb\?"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(ArgumentError, match=message):
        jobs(words)


def test_values_are_not_read():
    assert parse_settings(["env_kwargs=k=8,k=9"]) == {"env_kwargs": ("k=8", "k=9")}
