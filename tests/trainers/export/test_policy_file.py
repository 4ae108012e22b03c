import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch

from recurl.core.errors import ArgumentError, MissingDependencyError, NonFiniteError, StorageError, UnsupportedError
from recurl.trainers import (
    A2CConfig,
    DQNConfig,
    ImpalaConfig,
    PPOConfig,
    R2D2Config,
    RunFolder,
    SACConfig,
    TD3Config,
    check_export,
    export_run,
    load_agent,
    make_env,
)
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from recurl.trainers.export.policy_step import PolicyStep
from recurl.trainers.export.verification import verify
from tests.trainers.small_runs import trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

MEMORY = "recurl/RepeatPrevious-v0"


class Picture(gym.Env):
    """Environment with an image, a choice and a vector: the three kinds of observation."""

    observation_space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (4, 5, 1), np.uint8),
            "parts": gym.spaces.Dict({"place": gym.spaces.Box(-1, 1, (2,)), "choice": gym.spaces.Discrete(3)}),
        }
    )
    action_space = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 5.0], np.float32))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(1000)))
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, bool(self.np_random.random() < 0.1), False, {}


gym.register("recurl-test/Picture-v0", entry_point=Picture)

CASES = {
    "ppo-lstm-2": (PPOConfig, "recurl/MaskedCartPole-v1", {"cell": "lstm", "num_layers": 2}),
    "ppo-gru-continuous": (PPOConfig, "Pendulum-v1", {"cell": "gru"}),
    "ppo-none": (PPOConfig, "CartPole-v1", {"cell": "none"}),
    "ppo-own-trunks": (PPOConfig, MEMORY, {"cell": "lstm", "shared_trunk": False}),
    "a2c-gru": (A2CConfig, MEMORY, {"cell": "gru"}),
    "impala-lstm": (ImpalaConfig, "Pendulum-v1", {"cell": "lstm", "shared_trunk": False}),
    "dqn-lstm": (DQNConfig, MEMORY, {"cell": "lstm", "normalize_observations": True}),
    "r2d2-gru": (R2D2Config, "recurl/TMaze-v0", {"cell": "gru"}),
    "dqn-none": (DQNConfig, "CartPole-v1", {"cell": "none"}),
    "sac-lstm-continuous": (SACConfig, "Pendulum-v1", {"cell": "lstm", "shared_trunk": False}),
    "sac-gru": (SACConfig, MEMORY, {"cell": "gru"}),
    "td3-gru": (TD3Config, "Pendulum-v1", {"cell": "gru"}),
}


@pytest.fixture(scope="module")
def lstm(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("lstm"), PPOConfig, MEMORY, {"cell": "lstm"})


@pytest.fixture(scope="module")
def files(lstm, tmp_path_factory):
    """Exported files of the run's policy by format, fully verified; parent folders are created as well."""
    folder = tmp_path_factory.mktemp("files")
    return {
        "torch": export_run(lstm, "torch", folder / "deep" / "er" / "mine.pt2"),
        "onnx": export_run(lstm, "onnx", folder / "policy.onnx"),
    }


def about(path):
    return json.loads(path.with_name(path.name + ".json").read_text())


def arguments(description, rows):
    """Return valid inputs as NumPy arrays by name."""
    generator = np.random.default_rng(0)
    return {
        part["name"]: generator.integers(0, 2, (rows, *part["shape"][1:])).astype(part["dtype"])
        for part in description["inputs"]
    }


# A file of ONNX takes seconds to write: one of each kind of action, network and normalization here.
IN_ONNX = ("ppo-lstm-2", "dqn-lstm", "sac-lstm-continuous", "td3-gru")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "onnx" if case in IN_ONNX else "torch") for case in CASES),
        *(
            pytest.param(case, "onnx", marks=pytest.mark.full)
            for case in CASES
            if case not in (*IN_ONNX, "ppo-gru-continuous", "dqn-none")
        ),
    ],
)
@pytest.mark.usefixtures("brief_verification")
def test_exported_policies_fit_their_description(tmp_path, case, kind):
    path = export_run(trained(tmp_path, *CASES[case]), kind)
    description = about(path)
    assert path.suffix == {"torch": ".pt2", "onnx": ".onnx"}[kind]
    assert set(description["states"]) <= {part["name"] for part in description["inputs"]}
    for rows in (1, 2, 7):
        inputs = arguments(description, rows)
        if kind == "torch":
            function = torch.export.load(path).module()
            results = [value.numpy() for value in function(*map(torch.from_numpy, inputs.values()))]
        else:
            session = onnxruntime.InferenceSession(path)
            assert [value.name for value in session.get_inputs()] == list(inputs)
            assert [value.name for value in session.get_outputs()] == [part["name"] for part in description["outputs"]]
            assert all(value.shape[0] == "batch" for value in (*session.get_inputs(), *session.get_outputs()))
            results = session.run(None, inputs)
        for result, part in zip(results, description["outputs"], strict=True):
            assert (list(result.shape), str(result.dtype)) == ([rows, *part["shape"][1:]], part["dtype"])


@pytest.mark.full
def test_files_are_verified_with_a_thousand_steps(files):
    assert inspect.signature(verify).parameters["steps"].default == 1000
    assert [about(path)["verified_steps"] for path in files.values()] == [1000, 1000]


@pytest.mark.usefixtures("brief_verification")
def test_the_description_names_what_a_user_needs(tmp_path):
    description = about(export_run(trained(tmp_path, PPOConfig, "recurl-test/Picture-v0", {"cell": "gru"}), "onnx"))
    assert [(part["name"], part["shape"], part["dtype"]) for part in description["inputs"]] == [
        ("image", ["batch", 4, 5, 1], "uint8"),
        ("parts.place", ["batch", 2], "float32"),
        ("parts.choice", ["batch", 3], "float32"),
        ("is_init", ["batch"], "bool"),
        ("state_h", ["batch", 1, 8], "float32"),
    ]
    assert description["states"] == {"state_h": "next.state_h"}
    assert description["action"] == {"kind": "box", "low": [-2.0, 0.0], "high": [2.0, 5.0]}
    assert (description["algorithm"], description["cell"], description["env"]) == (
        "ppo",
        "gru",
        "recurl-test/Picture-v0",
    )


def test_a_torch_program_needs_torch_only(files):
    code = f"""
import sys
sys.modules.update(recurl=None, tensordict=None)
import torch
function = torch.export.load({str(files["torch"])!r}).module()
action, *states = function(torch.rand(3, 4), torch.ones(3, dtype=torch.bool), *torch.rand(2, 3, 1, 8))
print(action.shape[0], len(states))
"""
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert end.stdout.split() == ["3", "2"]


def policy_of(folder):
    config, agent = load_agent(folder)
    return PolicyStep(agent.actor), make_env(config, 2, policy=agent.actor)


def changed(policy, edit):
    """Return the policy as a function whose arguments and results are modified by ``edit``."""

    def function(arguments):
        with torch.no_grad():
            return edit(policy, list(arguments))

    return function


def without_resets(policy, arguments):
    arguments[1] = torch.zeros_like(arguments[1])
    return policy(*arguments)


def states_swapped(policy, arguments):
    action, h, c = policy(*arguments)
    return action, c, h


def states_not_carried(policy, arguments):
    return policy(*arguments)[0], *arguments[2:]


def another_action(policy, arguments):
    action, *states = policy(*arguments)
    return (action + 1) % 4, *states


def another_dtype(policy, arguments):
    action, *states = policy(*arguments)
    return action.int(), *states


def only_one_row(policy, arguments):
    action, *states = policy(*(argument[:1] for argument in arguments))
    return action, *states


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (without_resets, "next.state_h, next.state_c differ"),
        (states_swapped, "next.state_h, next.state_c differ"),
        (states_not_carried, "next.state_h, next.state_c differ"),
        (another_action, "action differ"),
        (another_dtype, "action differ"),
        (only_one_row, "action, next.state_h, next.state_c differ at step 0 of 200"),
    ],
)
def test_a_function_that_differs_is_refused(lstm, edit, what):
    policy, env = policy_of(lstm)
    with env:
        verify(changed(policy, lambda policy, arguments: policy(*arguments)), policy, env, 200)
        with pytest.raises(UnsupportedError, match=rf"must match the policy, but .*{what}"):
            verify(changed(policy, edit), policy, env, 200)


def test_a_tie_may_be_broken_the_other_way(tmp_path):
    policy, env = policy_of(trained(tmp_path, DQNConfig, MEMORY, {"cell": "gru", "head_width": 0}))
    head = policy.actor[-2][-1].module
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
    with env:
        verify(changed(policy, another_action), policy, env, 20)
        with torch.no_grad():
            head.bias[0] = 1.0
        with pytest.raises(UnsupportedError, match="action differ"):
            verify(changed(policy, another_action), policy, env, 20)


def test_nothing_is_written_of_a_function_that_differs(lstm, tmp_path, monkeypatch):
    def refuse(*_):
        raise UnsupportedError("differs")

    monkeypatch.setattr("recurl.trainers.export.policy_file.verify", refuse)
    with pytest.raises(UnsupportedError, match="differs"):
        export_run(lstm, "torch", tmp_path / "policy.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_a_gpu_is_exported_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr("recurl.trainers.export.policy_file.verify", lambda *_: None)
    folder = trained(tmp_path, PPOConfig, MEMORY, {"cell": "gru"})
    options = json.loads(folder.config.read_text()) | {"device": "cuda", "backend": "triton", "cuda_graph": True}
    folder.config.write_text(json.dumps(options))
    assert export_run(folder, "torch").exists()


def test_a_cell_without_a_step_in_cpp_has_other_formats(tmp_path):
    folder = trained(tmp_path, PPOConfig, MEMORY, {"cell": "slstm"})
    with pytest.raises(
        UnsupportedError, match=r"no step for this slstm\. Export it in another format, torch or onnx\."
    ):
        export_run(folder, "compiled")
    assert not (folder.path / "policy.recurl").exists()


def test_mistakes(lstm, tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="--format must be one of torch, onnx, compiled, got 'tf'"):
        export_run(lstm, "tf")
    with pytest.raises(ArgumentError, match=r"A file of format torch must end with \.pt2, got .*policy\.pt: name"):
        export_run(lstm, "torch", Path("policy.pt"))
    with pytest.raises(ArgumentError, match="holds no run"):
        export_run(RunFolder(tmp_path), "torch")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("recurl.trainers.export.policy_file.verify", lambda *_: None)
    with pytest.raises(StorageError, match=r"Can't write .*file \(.*\): use another folder.*named with --out"):
        export_run(lstm, "torch", tmp_path / "file" / "policy.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingDependencyError, match=r"onnxscript is not installed: pip install 'recurl\[export\]'"):
        export_run(lstm, "onnx")


@pytest.mark.parametrize("kind", ["torch", "onnx"])
def test_a_damaged_file_is_refused(files, tmp_path, kind):
    shutil.copytree(files[kind].parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / files[kind].name
    assert check_export(path) == about(path)
    data, draw = path.read_bytes(), np.random.default_rng(0)
    for bit in draw.integers(0, len(data) * 8, 100):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(ArgumentError, match=r"must have the SHA-256 in .*json, \w{64}, got \w{64}: it is damaged"):
            check_export(path)
    path.write_bytes(data)
    description = path.with_name(path.name + ".json")
    for text, said in (("{", "is not JSON"), ("[]", "must have the SHA-256 in .*, None")):
        description.write_text(text)
        with pytest.raises(ArgumentError, match=said):
            check_export(path)
    description.unlink()
    with pytest.raises(ArgumentError, match=r"json can't be read \(No such file"):
        check_export(path)


def test_what_was_written_is_verified_before_it_is_tried(lstm, tmp_path, monkeypatch):
    def damaged(program, path):
        path.write_bytes(b"no container")

    monkeypatch.setattr(torch.export, "save", damaged)
    with pytest.raises(ArgumentError, match=r"policy.pt2 is damaged \(File is not a zip file\): export the run again"):
        export_run(lstm, "torch", tmp_path / "policy.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_is_not_finite_is_refused(tmp_path):
    folder = trained(tmp_path, PPOConfig, MEMORY, {"cell": "gru"})
    path = latest_checkpoint(folder.checkpoints)
    state = load_checkpoint(path)
    state["algorithm"]["agent"]["critic.module.2.module.bias"][0] = torch.nan
    save_checkpoint(folder.checkpoints, int(path.stem), state)
    with pytest.raises(
        NonFiniteError, match=r"All numbers of the policy in .*pt must be finite, but critic.* holds nan"
    ):
        export_run(folder, "torch")


@pytest.mark.usefixtures("brief_verification")
def test_the_example_runs_without_recurl(tmp_path):
    folder = trained(tmp_path, PPOConfig, "CartPole-v1", {"cell": "lstm"})
    path = export_run(folder, "onnx")
    example = Path(__file__).parents[3] / "examples" / "onnx_inference.py"
    code = (
        "import runpy, sys; sys.modules.update(recurl=None, torch=None, tensordict=None); "
        f"sys.argv[1:] = [{str(path)!r}]; runpy.run_path({str(example)!r})"
    )
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(end.stdout.removeprefix("return ")) >= 8


def test_the_example_runs_on_a_task_of_recurl(files, programs):
    example = Path(__file__).parents[3] / "examples" / "onnx_inference.py"
    end = programs.run([sys.executable, example, files["onnx"]], capture_output=True, text=True, check=True)
    assert end.stdout.startswith("return ")
