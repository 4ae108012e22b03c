import gc
import io
import json
import os
import platform
import shlex
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recurl import __version__
from recurl.core.errors import ArgumentError, LockedError, MissingDependencyError
from recurl.core.keys import TRAJ_IDS
from recurl.core.versions import source_commit
from recurl.trainers import (
    A2CConfig,
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    RunFolder,
    SACConfig,
    TD3Config,
    Trainer,
)
from recurl.trainers.algorithms.configs import OnPolicyConfig
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

CLOCKS = ("wall_s", "cpu_s", "steps_per_s")


REPLAY = {"slices": 6, "slice_length": 8, "learning_starts": 128, "buffer_size": 200}
SWING_UP = {"env": "recurl/MaskedPendulum-v1", "env_kwargs": ("max_episode_steps=11",)}


def config(kind=PPOConfig, **options):
    own = {"entropy_coeff": 0.01} if issubclass(kind, OnPolicyConfig) else REPLAY
    own = {**own, **({"target_interval": 3} if issubclass(kind, DQNConfig) else {})}
    own = {**own, **{PPOConfig: {"sequence_length": 8}, R2D2Config: {"burn_in": 3}}.get(kind, {})}
    return kind(
        **{
            "env": "recurl/RepeatPrevious-v0",
            "env_kwargs": ("k=2", "episode_length=11"),
            "hidden_size": 8,
            "num_envs": 4,
            "rollout_steps": 16,
            "total_steps": 384,
            "checkpoint_every": 100,
            **own,
            **options,
        }
    )


def train(options, path, *, stop_after=None, resume=False):
    """Train in ``path``; return the outcome and the output."""
    out, folder = io.StringIO(), RunFolder(path)
    trainer = Trainer(options, folder, console=Console(file=out))
    if resume:
        trainer.resume()
    else:
        folder.create(options)
    left = iter(range(stop_after - 1, -1, -1)) if stop_after else None
    outcome = trainer.run(lambda: left is not None and next(left) == 0)
    trainer.close()
    return outcome, out.getvalue()


def test_the_garbage_collector_leaves_out_what_existed_before_a_run(tmp_path):
    options, folder = config(total_steps=128), RunFolder(tmp_path)
    folder.create(options)
    trainer = Trainer(options, folder, console=Console(file=io.StringIO()))
    gc.unfreeze()  # what conftest.py has frozen
    before, during = gc.get_freeze_count(), []
    trainer.run(lambda: bool(during.append(gc.get_freeze_count())))
    trainer.close()
    assert all(count > before + 10_000 for count in during)
    assert gc.get_freeze_count() == before


def metrics(path):
    header, *rows = [line.split(",") for line in RunFolder(path).metrics.read_text().splitlines()]
    keep = [column for column, name in enumerate(header) if name not in CLOCKS]
    return [[row[column] for column in keep] for row in (header, *rows)]


def differing(first, second, path=""):
    """Paths at which two nested states differ."""
    if isinstance(first, torch.Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
        return [] if same else [path]
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        return [place for key in first for place in differing(first[key], second[key], f"{path}/{key}")]
    if isinstance(first, list | tuple):
        assert len(first) == len(second)
        return [
            place
            for index, pair in enumerate(zip(first, second, strict=True))
            for place in differing(*pair, f"{path}/{index}")
        ]
    return [] if first == second else [path]


def final_state(path):
    state = load_checkpoint(latest_checkpoint(RunFolder(path).checkpoints))
    # Trajectory ids are labels, unique within the process.
    collector = state["algorithm"]["collector"]
    if "workers" in collector:
        (((part,),), (worker,)) = collector["parts"], collector["workers"]
        del part["entries"][TRAJ_IDS]
        collector = worker["collector"]
    del collector["traj_ids"]
    if "buffer" in state["algorithm"]:
        buffer = state["algorithm"]["buffer"]
        del buffer["keys"]["last"][TRAJ_IDS], buffer["storage"]["entries"][TRAJ_IDS]
    return {key: value for key, value in state.items() if key not in CLOCKS}


@pytest.mark.parametrize("package", ["tensorboard", "matplotlib"])
def test_a_missing_package_is_reported_before_the_run(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"{package} is not installed: pip install 'recurl\[train\]'"):
        Trainer(PPOConfig(env="recurl/TMaze-v0"), RunFolder(tmp_path), console=Console())


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "lstm"},
        {"cell": "gru", "overlap": True},
        {"cell": "gru", "shared_trunk": False},
        {"cell": "none"},
        {"cell": "gru", "vectorization": "device"},
        {"env": "recurl/MaskedCartPole-v1", "env_kwargs": ()},
        {"env": "recurl/MaskedPendulum-v1", "env_kwargs": ("max_episode_steps=11",), "shared_trunk": False},
        {"env": "recurl/TMaze-v0", "env_kwargs": ("corridor_length=3",), "num_layers": 2},
        {"kind": A2CConfig, "cell": "lstm"},
        {"kind": A2CConfig, **SWING_UP, "cell": "gru", "shared_trunk": False},
        {"kind": ImpalaConfig, "cell": "gru", "overlap": True},
        {"kind": ImpalaConfig, "cell": "none", "clip_epsilon": 0.2},
        {"kind": DQNConfig, "cell": "lstm", "normalize_observations": True},
        {"kind": DQNConfig, "cell": "none", "prioritized": True},
        {"kind": R2D2Config, "cell": "gru"},
        {"kind": SACConfig, "cell": "gru", "prioritized": True, "burn_in": 2},
        {"kind": SACConfig, **SWING_UP, "shared_trunk": False, "refresh_states": True},
        {"kind": TD3Config, **SWING_UP, "policy_delay": 3},
        {"kind": R2D2Config, "env": "recurl/TMaze-v0", "env_kwargs": ("corridor_length=3",), "start_state": "zero"},
    ],
)
@pytest.mark.usefixtures("shared_interpreter")
def test_stopped_and_resumed_equals_uninterrupted(tmp_path, options):
    options = config(**options)
    whole, _ = train(options, tmp_path / "whole")
    half, _ = train(options, tmp_path / "half", stop_after=3)
    assert (half.status, half.env_steps) == ("stopped", 192)
    assert len(metrics(tmp_path / "half")) == 4
    saved = load_checkpoint(latest_checkpoint(RunFolder(tmp_path / "half").checkpoints))["cpu_s"]
    resumed, printed = train(options, tmp_path / "half", resume=True)
    assert "Notice" not in printed
    assert (resumed.status, resumed.env_steps, resumed.return_mean) == ("finished", 384, whole.return_mean)
    assert resumed.cpu_s > saved > 0  # changes after the checkpoint, such as the plot, aren't in it
    assert metrics(tmp_path / "half") == metrics(tmp_path / "whole")
    assert differing(final_state(tmp_path / "half"), final_state(tmp_path / "whole")) == []


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    options = config(checkpoint_every=2)
    train(options, tmp_path / "whole")

    def crash():
        raise SystemError

    trainer = Trainer(options, RunFolder(tmp_path / "run"), console=Console(file=io.StringIO()))
    RunFolder(tmp_path / "run").create(options)
    calls = iter([False, False, False, True])
    with pytest.raises(SystemError):
        trainer.run(lambda: next(calls) and crash())
    assert len(metrics(tmp_path / "run")) == 5
    trainer.close()
    (tmp_path / "run" / "checkpoints" / "000000000256.pt").unlink(missing_ok=True)
    train(options, tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_same_seed_same_run_other_seed_other_run(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        train(config(seed=seed, total_steps=128), tmp_path / name)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert differing(final_state(tmp_path / "a"), final_state(tmp_path / "b")) == []
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


def test_checkpoints_without_the_state_of_environments_start_over_with_a_notice(tmp_path):
    options = config(env="CartPole-v1", env_kwargs=())
    train(options, tmp_path, stop_after=3)
    newest = latest_checkpoint(RunFolder(tmp_path).checkpoints)
    state = load_checkpoint(newest)
    state["algorithm"]["collector"] |= {"env": None, "root": None}  # as saved by earlier versions for CartPole
    save_checkpoint(newest.parent, 192, state)
    outcome, printed = train(options, tmp_path, resume=True)
    assert "CartPole-v1 isn't restored: the checkpoint has no matching state." in " ".join(printed.split())
    assert (outcome.status, outcome.env_steps) == ("finished", 384)
    assert len(metrics(tmp_path)) == 7


def test_ends_when_solved_and_stays_so(tmp_path):
    options = config(stop_return=0.0)
    outcome, _ = train(options, tmp_path)
    assert outcome.status == "solved"
    assert outcome.env_steps < 384
    again, _ = train(options, tmp_path, resume=True)
    assert (again.status, again.env_steps) == ("solved", outcome.env_steps)


def test_every_start_records_its_provenance(tmp_path):
    options = config(checkpoint_every=1)
    train(options, tmp_path, stop_after=2)
    train(options, tmp_path, resume=True)
    first, second = (json.loads(line) for line in RunFolder(tmp_path).versions.read_text().splitlines())
    assert (first["env_steps"], second["env_steps"]) == (0, 128)
    assert first["time"] <= second["time"] <= datetime.now(UTC).isoformat()
    for about in (first, second):
        assert about["recurl"] == __version__
        assert about["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
        assert about["python"] == platform.python_version()
        assert (about["gpu"], about["ranks"], about["commit"]) == (None, 1, source_commit())
        assert about["cpu"]
        assert shlex.split(about["command"]) == sys.orig_argv
    RunFolder(tmp_path).versions.unlink()  # runs of earlier versions have none
    train(options, tmp_path, resume=True)
    assert json.loads(RunFolder(tmp_path).versions.read_text())["env_steps"] == 384


@pytest.mark.usefixtures("plots")
def test_run_folder_holds_everything(tmp_path):
    train(config(), tmp_path)
    folder = RunFolder(tmp_path)
    assert folder.read_config() == config()
    assert folder.curve.read_bytes().startswith(b"\x89PNG")
    assert len(list(folder.tensorboard.iterdir())) == 1
    header, *rows = metrics(tmp_path)
    assert len(rows) == 6
    for column in ("env_steps", "return_mean_20", "loss_objective", "loss_critic", "loss_entropy"):
        assert column in header
    whole_header = folder.metrics.read_text().splitlines()[0]
    assert set(CLOCKS) <= set(whole_header.split(","))


def make_trainer(options, folder):
    return Trainer(options, folder, console=Console(file=io.StringIO()))


def test_a_new_run_needs_the_folder_of_one(tmp_path):
    options, folder = config(total_steps=64), RunFolder(tmp_path / "run")
    trainer = make_trainer(options, folder)
    with pytest.raises(ArgumentError, match=r"There is no run in .*: create its folder first, folder.create\(config\)"):
        trainer.run()
    folder.create(config(total_steps=64, seed=1))
    words = r"must be the folder of a new run with these options.*to resume the existing run, call trainer.resume"
    with pytest.raises(ArgumentError, match=words):
        trainer.run()
    folder.create(options, overwrite=True)
    assert trainer.run().status == "finished"
    trainer.close()
    with pytest.raises(ArgumentError, match=words):
        make_trainer(options, folder).run()
    with pytest.raises(ArgumentError, match="already holds a run"):
        folder.create(options)


def test_a_folder_is_held_from_resume_to_the_end(tmp_path):
    options, folder, other = config(total_steps=128, checkpoint_every=1), RunFolder(tmp_path), RunFolder(tmp_path)
    train(options, tmp_path, stop_after=1)
    trainer = make_trainer(options, folder)
    trainer.resume()
    for use in (make_trainer(options, other).resume, lambda: other.create(options, overwrite=True)):
        with pytest.raises(LockedError, match=r"Another process .* is using"):
            use()

    def stays_held():
        with pytest.raises(LockedError, match=r"Another process .* is using"), other.hold():
            pass
        return False

    trainer.run(stays_held)
    with other.hold():
        pass
    trainer = make_trainer(options, folder)
    trainer.resume()
    trainer.close()
    with other.hold():
        pass
    for path in folder.checkpoints.iterdir():
        path.unlink()
    with pytest.raises(ArgumentError, match="There is no checkpoint"):
        trainer.resume()
    with other.hold():
        pass


def test_rows_are_on_the_disk_before_the_checkpoint_that_counts_them(tmp_path, monkeypatch):
    """In an order that survives a power failure: rows, checkpoint, its name, and then removal of the old one."""
    log, fsync, replace, unlink = [], os.fsync, Path.replace, Path.unlink
    name = lambda path: Path(path).name.split(".")[0] + Path(path).suffix  # noqa: E731 - without the process id
    monkeypatch.setattr(
        os, "fsync", lambda fd: log.append(f"sync {name(os.readlink(f'/proc/self/fd/{fd}'))}") or fsync(fd)
    )
    monkeypatch.setattr(Path, "replace", lambda path, to: log.append(f"name {name(to)}") or replace(path, to))
    monkeypatch.setattr(Path, "unlink", lambda path, **more: log.append(f"drop {name(path)}") or unlink(path, **more))
    options, folder = config(total_steps=192, checkpoint_every=1), RunFolder(tmp_path / "run")
    folder.create(options)
    trainer = make_trainer(options, folder)
    assert "sync run" in log[: log.index("name config.json")]
    assert log[-1] == "sync run"
    log.clear()
    trainer.run()
    trainer.close()
    log = [
        entry for entry in log if not (entry.startswith("drop") and entry.endswith(".partial"))
    ]  # left by killed runs
    start = log.index("name 000000000128.pt")
    assert log[start - 3 : start + 2] == [
        "sync metrics.csv",
        "sync run",
        "sync 000000000128.partial",
        "name 000000000128.pt",
        "sync checkpoints",
    ]
    third = log[start + 3 :]
    assert third.index("sync checkpoints") < third.index("drop 000000000064.pt")


def test_a_folder_that_was_half_replaced_is_none(tmp_path):
    train(config(total_steps=64), tmp_path)
    folder = RunFolder(tmp_path)
    shutil.rmtree(folder.checkpoints)
    trainer = make_trainer(config(total_steps=64), folder)
    with pytest.raises(ArgumentError, match="the run stopped before its first one; train it again"):
        trainer.resume()
    trainer.close()
