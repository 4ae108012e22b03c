"""Whatever is changed in a run's files, the result is a single recurl error or a run that continues."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from recurl.core.errors import ArgumentError
from recurl.trainers import PPOConfig, R2D2Config, RunFolder, Trainer
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from recurl.trainers.files.contents import contents_of, first_difference

pytestmark = pytest.mark.usefixtures("no_curves")

VALUES = (None, "x", [], {}, -1, 1.5, True, math.nan, {"a": 1})


@pytest.fixture(scope="module", params=["ppo", "r2d2"])
def run(request, tmp_path_factory):
    """A run of two updates, with a third one left to make."""
    own = {"sequence_length": 4} if request.param == "ppo" else {"slices": 2, "slice_length": 4, "burn_in": 1}
    more = {} if request.param == "ppo" else {"learning_starts": 8, "buffer_size": 64}
    kind = {"ppo": PPOConfig, "r2d2": R2D2Config}[request.param]
    small = {"hidden_size": 4, "num_envs": 4, "rollout_steps": 8, "total_steps": 96}
    options = kind(env="recurl/RepeatPrevious-v0", env_kwargs=("k=1",), **small, **own, **more)
    folder = RunFolder(tmp_path_factory.mktemp("run"), pytest.fail)
    folder.create(options)
    trainer, left = Trainer(options, folder, console=Console(file=io.StringIO())), iter([False, True])
    trainer.run(lambda: next(left))
    trainer.close()
    return folder


def places(value, path=()):
    """Paths of all values in a nested state."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*path, key))
    elif isinstance(value, list | tuple) and len(value) < 10:
        for index, part in enumerate(value):
            yield from places(part, (*path, index))


def edited(value, path, edit):
    """A copy of a nested state with ``edit`` applied at a path."""
    if not path:
        return edit(value)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    parts = {key: edited(part, path[1:], edit) if key == path[0] else part for key, part in items}
    parts = {key: part for key, part in parts.items() if part is not places}
    return parts if isinstance(value, dict) else type(value)(parts.values())


def remove(_):
    return places  # an object of an unrelated type


def other(value):
    """Replacements of another type, shape or value."""
    if isinstance(value, torch.Tensor):
        changes = [
            value.unsqueeze(0),
            value.to(torch.complex64),
            value.numel(),
            ~value if value.dtype == torch.bool else value + 1,
        ]
        return changes[value.numel() % len(changes)]
    return next(choice for choice in VALUES[len(repr(value)) % len(VALUES) :] + VALUES if choice != value)


@pytest.mark.slow
def test_every_change_of_a_checkpoint_is_found(run, tmp_path):
    whole = load_checkpoint(latest_checkpoint(run.checkpoints))
    del whole["format_version"]
    table, count = contents_of(whole), 0
    for count, path in enumerate(places(whole)):
        for edit in (remove, other):
            state = edited(whole, path, edit)
            assert first_difference(state, table) is not None, path
            if count % 50 == 0:
                torch.save({"format_version": 2, "contents": table, **state}, tmp_path / "1.pt")
                with pytest.raises(ArgumentError, match="was modified after it was written"):
                    load_checkpoint(tmp_path / "1.pt")
    assert count > 150


def test_no_change_of_the_options_is_a_traceback(run):
    text = run.config.read_text()
    options = json.loads(text)
    changes = [{**options, name: value} for name in options for value in VALUES]
    changes += [{key: value for key, value in options.items() if key != name} for name in options]
    refused = 0
    for change in changes:
        run.config.write_text(json.dumps(change))
        try:
            run.read_config()
        except ArgumentError:
            refused += 1
    run.config.write_text(text)
    assert refused > len(changes) / 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_envs", 2), ("env_kwargs", ["k=2"]), ("hidden_size", 5), ("cell", "gru")],
)
def test_options_that_do_not_fit_the_checkpoint(run, name, value):
    text = run.config.read_text()
    run.config.write_text(json.dumps({**json.loads(text), name: value}))
    try:
        trainer = Trainer(run.read_config(), run, console=Console(file=io.StringIO()))
        with pytest.raises(ArgumentError, match=rf"doesn't fit .*({name} must stay|RuntimeError|KeyError)"):
            trainer.resume()
        trainer.close()
    finally:
        run.config.write_text(text)


@pytest.mark.parametrize("value", [1e300, -1.0, float("nan")])
def test_durations_that_no_run_has(run, value):
    path = latest_checkpoint(run.checkpoints)
    whole = path.read_bytes()
    save_checkpoint(run.checkpoints, int(path.stem), {**load_checkpoint(path), "wall_s": value})
    trainer = Trainer(run.read_config(), run, console=Console(file=io.StringIO()))
    with pytest.raises(ArgumentError, match=r"doesn't fit .*wall_s must be between 0 and 1e"):
        trainer.resume()
    trainer.close()
    path.write_bytes(whole)


def test_a_run_without_its_table_of_contents_resumes(run):
    path = latest_checkpoint(run.checkpoints)
    whole = torch.load(path, weights_only=True)
    del whole["contents"]
    torch.save(whole, path)
    trainer = Trainer(run.read_config(), run, console=Console(file=io.StringIO()))
    trainer.resume()
    assert trainer.run().status == "finished"
    trainer.close()
