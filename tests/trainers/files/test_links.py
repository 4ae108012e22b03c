"""Links, FIFOs and devices in place of a run's files and folders: nothing outside the folder is touched."""

import io
import os
import shutil
import socket
from contextlib import closing

import pytest
from rich.console import Console

import recurl
from recurl.cli.main import main
from recurl.core.errors import ArgumentError, StorageError
from recurl.trainers import PPOConfig, RunFolder, Trainer
from recurl.trainers.files.durable import write_atomic
from recurl.trainers.files.lock import FolderLock
from recurl.trainers.files.owner import OwnerFile
from recurl.trainers.report.metrics import MetricsFile
from recurl.trainers.study.curves import find_runs
from recurl.trainers.study.grid import Job
from recurl.trainers.study.sweep import Sweep

pytestmark = pytest.mark.usefixtures("no_curves")

CONFIG = PPOConfig(
    env="recurl/RepeatPrevious-v0", env_kwargs=("k=1",), num_envs=4, rollout_steps=8, hidden_size=4, total_steps=96
)


def train(folder, updates):
    console, left = Console(file=io.StringIO()), iter(range(updates))
    with folder.hold(), closing(Trainer(folder.read_config(), folder, console=console)) as trainer:
        if any(folder.checkpoints.glob("*.pt")):
            trainer.resume()
        trainer.run(lambda: next(left) == updates - 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("run") / "run", pytest.fail)
    folder.create(CONFIG)
    train(folder, 2)
    return folder.path


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return RunFolder(tmp_path / "run")


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "000000000007.pt").write_text("mine")
    (folder / "mine").write_text("mine")
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"000000000007.pt": "mine", "mine": "mine"}


@pytest.mark.parametrize("name", ["checkpoints", "best", "tensorboard", "wandb"])
def test_links_in_place_of_folders_are_refused(run, outside, name):
    shutil.rmtree(run.path / name, ignore_errors=True)
    (run.path / name).symlink_to(outside)
    for use in (
        lambda: train(run, 1),
        lambda: run.create(CONFIG, overwrite=True),
        run.read_checkpoint,
        lambda: run.extend(1000),
        lambda: recurl.load(run.path),
    ):
        with pytest.raises(ArgumentError, match=rf"{name} can't be used \(it is a symbolic link\)"):
            use()
    assert main(["train", "--resume", str(run.path)]) == 2


def test_a_run_folder_that_is_a_link_is_the_users_word(run, tmp_path):
    (tmp_path / "link").symlink_to(run.path)
    train(RunFolder(tmp_path / "link"), 1)


@pytest.mark.parametrize("name", [".lock", "metrics.csv", "config.json", "learning_curve.png"])
@pytest.mark.usefixtures("plots")
def test_links_in_place_of_files_are_never_written(run, outside, name):
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(outside / "mine")
    with pytest.raises((ArgumentError, StorageError)):
        train(run, 2)


def test_links_to_files_that_do_not_exist_make_none(run, outside):
    for name in (".lock", "metrics.csv"):
        (run.path / name).unlink()
        (run.path / name).symlink_to(outside / "new")
        with pytest.raises(StorageError, match=rf"{name.replace('.', '[.]')}|it is a symbolic link"):
            train(run, 1)


def test_a_link_in_place_of_a_checkpoint_is_not_read(run, tmp_path):
    (newest,) = run.checkpoints.iterdir()
    newest.rename(tmp_path / "moved.pt")
    newest.symlink_to(tmp_path / "moved.pt")
    with pytest.raises(ArgumentError, match="it is a symbolic link"):
        run.read_checkpoint()


def test_hard_links_are_not_written_through(run, outside):
    lock = run.path / ".lock"
    lock.unlink()
    os.link(outside / "mine", lock)
    with FolderLock(run.path, pytest.fail).hold():
        assert lock.read_text() == "mine"
    copy = run.path.with_name("copy.csv")
    os.link(run.metrics, copy)
    before = copy.read_bytes()
    file = MetricsFile(run.metrics, ["update", "env_steps", "return_mean_20"], updates=1, notify=pytest.fail)
    file.write({"update": 2, "env_steps": 64, "return_mean_20": 0.0})
    file.close()
    assert copy.read_bytes() == before != run.metrics.read_bytes()


def irregular(path, kind, target):
    if kind == "link":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))


@pytest.mark.parametrize("kind", ["link", "fifo", "socket"])
def test_only_regular_files_are_replaced(tmp_path, outside, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    irregular(path, kind, outside / "mine")
    with pytest.raises(StorageError, match=r"Can't write .*file \(it is (a symbolic link|not a regular file)\): use"):
        write_atomic(path, b"data")
    assert not path.is_file() or path.is_symlink()
    assert sorted(tmp_path.iterdir()) == [path, outside]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_files_named_on_a_command_line_are_not_replaced_either(run, tmp_path, outside, kind):
    """A FIFO, as an example of a file that isn't regular: only root can create devices."""
    for name, words in (
        ("options.toml", ["train", "ppo", "--env", "recurl/RepeatPrevious-v0", "--save-config"]),
        ("policy.recurl", ["export", str(run.path), "--format", "compiled", "--out"]),
        ("curves.png", ["compare", str(run.path), "--out"]),
    ):
        path = tmp_path / name
        irregular(path, kind, outside / "mine")
        before = path.lstat()
        assert main([*words, str(path)]) == 2
        assert os.path.samestat(path.lstat(), before)


def test_a_link_under_the_name_of_the_partial_file_is_removed(tmp_path, outside):
    (tmp_path / f"file.{os.getpid()}.partial").symlink_to(outside / "mine")
    write_atomic(tmp_path / "file", b"data")
    assert (tmp_path / "file").read_bytes() == b"data"


def test_sweeps_keep_to_their_folder(run, tmp_path, outside):
    job, sweep = Job("seed=0", {}, CONFIG), tmp_path / "sweep"
    with Sweep(sweep, [job], print).hold():
        pass
    (sweep / "seed=0").symlink_to(run.path)
    with (
        pytest.raises(ArgumentError, match=r"seed=0 can't be used \(it is a symbolic link\)"),
        Sweep(sweep, [job], print).hold(),
    ):
        pass
    with pytest.raises(ArgumentError, match=r"seed=0 is a symbolic link: name the run"):
        find_runs([sweep])
    (sweep / "seed=0").unlink()
    (sweep / "seed=0.log").symlink_to(outside / "mine")
    started = Sweep(sweep, [job], print)
    with pytest.raises(StorageError, match="it is a symbolic link"), started.hold():
        started.run(1, report=lambda _: None, should_stop=lambda: False)


def test_an_owner_file_that_is_a_fifo_does_not_block(tmp_path):
    os.mkfifo(tmp_path / ".owner")
    with pytest.raises(recurl.core.errors.LockedError, match="another process is using this folder"):
        OwnerFile(tmp_path / ".owner", lambda _: None).take()


def test_names_that_are_no_steps_are_no_checkpoints(run):
    for name in ("²³.pt", "٣.pt", "x.pt"):
        (run.checkpoints / name).write_text("x")
    assert run.read_checkpoint()[1]["format_version"] == 2
