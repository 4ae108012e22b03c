"""Images and nested observations in whole runs: batches, buffers, checkpoints, evaluation, export, doctor."""

import io
import json

import pytest
import torch
from rich.console import Console

from recurl.cli import main
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.data import LazyTensorStorage
from recurl.diagnostics import check_wiring
from recurl.trainers import (
    DQN,
    PPO,
    DQNConfig,
    PPOConfig,
    R2D2Config,
    RunFolder,
    Trainer,
    evaluate_run,
    export_run,
    load_agent,
    make_env,
)
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from tests.trainers.sights import CAMERA, PARTS

pytestmark = pytest.mark.usefixtures("no_curves")

DROP = {"drop_observations": ("mission",)}


def config(kind=PPOConfig, env=CAMERA, **options):
    small = {"num_envs": 2, "rollout_steps": 16, "total_steps": 128, "hidden_size": 8, "checkpoint_every": 2}
    own = {"sequence_length": 8, "minibatches": 2}
    if kind is not PPOConfig:
        own = {"learning_starts": 32, "slices": 3, "slice_length": 4, "buffer_size": 100, "burn_in": 0}
    dropped = DROP if env == PARTS else {}
    return kind(env=env, **{**small, **own, **dropped, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "lstm"},
        {"cell": "gru", "encoder_width": 16, "encoder_layers": 2, "head_width": 4, "num_layers": 2},
        {"cell": "gru", "head_width": 4, "head_layers": 3},
        {"cell": "none", "shared_trunk": False},
        {"encoder": "impala"},
        {"encoder": "mlp"},
        {"env": PARTS},
        {"env": PARTS, "encoder_width": 6, "normalize_observations": False},
    ],
    ids=str,
)
def test_an_update_of_ppo_changes_every_weight(options):
    torch.manual_seed(0)
    ppo = PPO(config(**options))
    before = {name: value.clone() for name, value in ppo.agent.named_parameters()}
    batch = ppo.collect()
    assert ppo.collector.explain()["tensors"] is None
    for part in (batch, batch["next"]):
        assert part["image" if ppo.config.env == PARTS else "observation"].dtype == torch.uint8
    row = ppo.learn(batch)
    assert ppo.loss.explain()["tensors"] is ppo.estimator.explain()["tensors"] is None
    assert all(torch.tensor(list(row.values())).isfinite())
    assert [name for name, value in ppo.agent.named_parameters() if torch.equal(value, before[name])] == []
    ppo.close()


@pytest.mark.parametrize("env", [CAMERA, PARTS])
def test_ratio_is_one_at_first(env):
    ppo = PPO(config(env=env, learning_rate=1e-12))
    for _ in range(3):
        row = ppo.learn(ppo.collect())
        assert abs(row["loss_objective"]) < 1e-5
        assert row["clip_fraction"] == 0
        assert row["kl_approx"] < 1e-5
    key = "image" if env == PARTS else "observation"
    assert ppo.collector.collect()[key].max() <= 200 == ppo.agent.scales[0].largest
    ppo.close()


@pytest.mark.parametrize("kind", [DQNConfig, R2D2Config])
def test_replayed_images_stay_uint8(kind):
    learner = DQN(config(kind, PARTS))
    for _ in range(2):
        row = learner.learn(learner.collect())
    assert torch.tensor(row["loss"]).isfinite()
    assert isinstance(learner.buffer.storage, LazyTensorStorage)
    sample = learner.buffer.sample()
    assert sample["image"].dtype == sample["next", "image"].dtype == torch.uint8
    assert ("rest", "2", "levels") in sample.keys(True, True)
    learner.close()


@pytest.fixture(scope="module", params=[CAMERA, PARTS], ids=["camera", "parts"])
def finished(request, tmp_path_factory):
    """Folders of a run, and of the same run stopped halfway and resumed."""
    return [trained(tmp_path_factory.mktemp("run"), config(env=request.param), stop) for stop in (False, True)]


def trained(path, options, stop=False):
    folder = RunFolder(path / "run")
    folder.create(options)
    for _ in range(1 + stop):
        trainer = Trainer(options, folder, console=Console(file=io.StringIO()))
        if folder.checkpoints.exists():
            trainer.resume()
        trainer.run(lambda: stop and trainer.algorithm.env_steps == 64)  # noqa: B023 - called within the loop
        trainer.close()
    return folder


@pytest.mark.slow
def test_a_resumed_run_continues_bit_for_bit(finished):
    states = [load_checkpoint(latest_checkpoint(folder.checkpoints)) for folder in finished]
    agents = [state["algorithm"]["agent"] for state in states]
    assert agents[0].keys() == agents[1].keys()
    assert all(torch.equal(value, agents[1][name]) for name, value in agents[0].items())
    assert states[0]["config"]["drop_observations"] == list(finished[0].read_config().drop_observations)


@pytest.mark.slow
@pytest.mark.usefixtures("brief_verification")
def test_evaluated_exported_and_diagnosed(finished, tmp_path):
    folder = finished[0]
    assert len(evaluate_run(folder, episodes=3).returns) == 3
    options, agent = load_agent(folder)
    with make_env(options, 2, policy=agent.policy) as env:
        assert all(result.passed for result in check_wiring(agent.policy, env, 32))
    kind = "torch" if options.env == CAMERA else "onnx"
    file = export_run(folder, kind, tmp_path / f"policy.{'pt2' if kind == 'torch' else 'onnx'}")  # compares 100 steps
    inputs = json.loads(file.with_name(f"{file.name}.json").read_text())["inputs"]
    assert [part["dtype"] for part in inputs if part["shape"][1:] == [24, 24, 3]] == ["uint8"]
    names = {part["name"] for part in inputs} - {"is_init", "state_h", "state_c"}
    assert names == ({"observation"} if options.env == CAMERA else {"image", *NESTED})


NESTED = ("rest.0", "rest.1", "rest.2.levels", "rest.2.bits")


def test_too_small_images_are_refused_with_the_key_and_the_sizes():
    with pytest.raises(ArgumentError, match=r"The image observation .*: The encoder nature needs .* 36x36, got 24x24"):
        PPO(config(encoder="nature"))


def test_texts_are_refused_by_key():
    with pytest.raises(UnsupportedError, match=r"observation 'mission' is Text.*\(--drop-observations mission\)"):
        PPO(config(env=PARTS, drop_observations=()))


def test_the_command_line_shows_the_network_and_trains_nothing(tmp_path, capsys):
    arguments = ["train", "r2d2", "--env", PARTS, "--drop-observations", "mission", "rest.2", "--head-width", "5"]
    assert main([*arguments, "--hidden-size", "8", "--print-model", "--run-dir", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    assert "image   uint8 [24, 24, 3]  image, hwc" in said
    assert "rest.1  float32 [5]        choices" in said
    assert "rest.2" not in said
    assert "Conv2d(3, 16" in said
    assert "Linear(in_features=8, out_features=5, bias=True)" in said


@pytest.mark.slow
def test_an_image_seen_once_is_remembered():
    """The cue is in the first image only: chance is 0.5."""
    sizes = {"num_envs": 8, "rollout_steps": 20, "sequence_length": 20, "minibatches": 8, "hidden_size": 32}
    ppo = PPO(config(total_steps=80 * 8 * 20, learning_rate=3e-3, gamma=0.9, **sizes))
    for _ in range(80):
        batch = ppo.collect()
        reward = batch["next", "reward"][batch["next", "done"]].mean().item()  # of whole episodes
        ppo.learn(batch)
        if reward > 0.95:
            break
    ppo.close()
    assert reward > 0.9
