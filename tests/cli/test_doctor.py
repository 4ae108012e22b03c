from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recurl.cli import main

pytestmark = pytest.mark.slow

MODULE = """
import torch
from tensordict.nn import TensorDictModule as Mod, TensorDictSequential as Seq
from recurl.envs import GymEnv, InitTracker
from recurl.modules import GRUModule

number = 3

def policy_for(env):
    return make(env.observation_spec["observation"].shape[-1])

def policy():
    return make(2)

def make(inputs):
    gru = GRUModule(inputs, 8, in_key="observation", out_key="features")
    return Seq(gru, Mod(lambda x: (x.sum(-1) > 0).long(), ["features"], ["action"]))

def feed_forward():
    return Mod(lambda x: (x.sum(-1) > 0).long(), ["observation"], ["action"])

def dropping(env):
    return Seq(Mod(torch.nn.Dropout(0.5), ["observation"], ["observation2"]), *policy_for(env).module)

def plain(env):
    class Plain(torch.nn.LSTM):
        def forward(self, x):
            return (super().forward(x)[0].sum(-1) > 0).long()
    return Mod(Plain(4, 8), ["observation"], ["action"])

def no_policy():
    return 7

def broken():
    raise RuntimeError("of no use")

def wired(num_envs=None):
    return GymEnv("recurl/MaskedCartPole-v1", num_envs=num_envs, policy=make(2))

def no_primer(length=None):
    return GymEnv("recurl/MaskedCartPole-v1").append_transform(InitTracker())
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wires.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "wires", raising=False)


def test_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("torch", "backends on cpu", "fastest", "precision", "triton"):
        assert word in said


@pytest.mark.parametrize(
    "arguments",
    [
        "--env recurl/MaskedCartPole-v1 --policy wires:policy",
        "--env recurl/MaskedCartPole-v1 --policy wires:policy_for --num-envs 3 --steps 20",
        "--env recurl/RepeatPrevious-v0 --env-kwargs k=2 num_symbols=2 --policy wires:policy_for",
        "--env wires:wired --policy wires:policy",
        "--env wires:wired --num-envs 2 --policy wires:policy_for",
        "--env wires:no_primer --policy wires:policy --auto-register-policy-transforms",
    ],
)
def test_good_wiring(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments.split()]) == 0
    said = capsys.readouterr().out
    assert "FAIL" not in said
    assert said.splitlines()[-1] == "all 19 checks passed"


def test_bad_wiring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--env", "wires:no_primer", "--env-kwargs", "length=None", "--policy", "wires:policy"]) == 1
    said = capsys.readouterr().out
    assert "FAIL  primers" in said
    assert "fix: env = env.append_transform(get_primers_from_module(policy))" in said
    assert "checks failed: primers, feedback" in said
    assert (
        main(["doctor", "--env", "CartPole-v1", "--policy", "wires:policy_for", "--no-auto-register-policy-transforms"])
        == 1
    )
    assert "FAIL  tracker" in capsys.readouterr().out


def test_in_the_mode_that_it_is_given_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--env", "CartPole-v1", "--num-envs", "2", "--policy", "wires:dropping"]) == 1
    said = capsys.readouterr().out
    assert "FAIL  repeat" in said
    assert "fix: call policy.eval() before collection" in said
    assert said.splitlines()[-1] == "1 of 10 checks failed: repeat; start with the first"


@pytest.mark.parametrize(("rows", "name"), [([], "collection"), (["--num-envs", "2"], "rows")])
def test_a_plain_recurrent_network(rows: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--env", "CartPole-v1", *rows, "--policy", "wires:plain"]) == 1
    said = capsys.readouterr().out
    assert f"FAIL  {name}" in said
    assert "with LSTMModule(input_size=4, hidden_size=8, in_key=..., out_key=...) of recurl.modules" in said


def test_feed_forward(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--env", "CartPole-v1", "--policy", "wires:feed_forward"]) == 0
    said = capsys.readouterr().out
    assert "it is feed-forward" in said
    assert said.splitlines()[-1] == "all 7 checks passed"


def test_agents_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pettingzoo")
    for env in ("classic/rps_v2", "pettingzoo.classic.rps.rps:parallel_env"):
        assert main(["doctor", "--env", f"pettingzoo/{env}", "--num-envs", "4", "--policy", "wires:policy_for"]) == 0
        assert "all 19 checks passed" in capsys.readouterr().out


PPO = "ppo --rollout-steps 16 --sequence-length 8 --total-steps 32 --minibatches 2"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (f"{PPO} --cell lstm", "action_log_prob"),
        (f"{PPO} --cell gru --no-shared-trunk", "action_log_prob"),
        (f"{PPO} --cell none", "feed-forward"),
        ("dqn --total-steps 64 --cell gru", "action_value"),
        ("r2d2 --total-steps 64 --cell lstm", "action_value"),
    ],
)
def test_a_run(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--env recurl/RepeatPrevious-v0 --hidden-size 8 --num-envs 2 --eval-episodes 2 --run-dir run"
    assert main(["train", *options.split(), *small.split()]) == 0
    capsys.readouterr()
    assert main(["doctor", "run"]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--policy wires:policy", "both --env and --policy"),
        ("--env CartPole-v1", "both --env and --policy"),
        ("run --env CartPole-v1 --policy wires:policy", "Name a run, or"),
        ("run --policy wires:policy", "Name a run, or"),
        ("run --num-envs 2", "--num-envs can't be given with a run, whose own environment is checked: leave it out"),
        ("run --env-kwargs k=8 --drop-observations x", "--env-kwargs, --drop-observations can't be given with a run"),
        ("no/run", "no/run"),
        ("--colour red", "--colour"),
        ("--num-envs many --env CartPole-v1 --policy wires:policy", "--num-envs"),
        ("--env NoSuch-v0 --policy wires:policy", "--env NoSuch-v0 can't be created"),
        ("--env CartPole-v1 --env-kwargs colour=red --policy wires:policy", "--env CartPole-v1 can't be created"),
        ("--env CartPole-v1 --env-kwargs colour --policy wires:policy", "name=value"),
        ("--env wires:policy --policy wires:policy", "must return a recurl environment"),
        ("--env wires:nothing --policy wires:policy", "nothing"),
        ("--env CartPole-v1 --policy nowhere:policy", "--policy: there is no module 'nowhere'"),
        ("--env CartPole-v1 --policy ..:policy", "--policy"),
        ("--env CartPole-v1 --policy wires", "takes module:function"),
        ("--env CartPole-v1 --policy wires:number", "must be a function, got int"),
        ("--env CartPole-v1 --policy wires:no_policy", "must return a policy, got int"),
        ("--env CartPole-v1 --policy wires:broken", "RuntimeError: of no use"),
        ("--env CartPole-v1 --policy wires:policy_for --steps 2", "steps must be at least 8"),
    ],
)
def test_mistakes_are_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert words in said


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--help"])
    assert end.value.code == 0
    assert "module:function" in capsys.readouterr().out


def test_as_a_command(tmp_path: Path) -> None:
    """The installed command also imports from the working directory, and needs no extra."""
    code = (
        "import sys; sys.modules.update(rich=None, matplotlib=None, tensorboard=None)\n"
        "from recurl.cli import main; sys.path[:] = [path for path in sys.path if path]\n"
        "print([main(words.split()) for words in sys.argv[1:]])"
    )
    commands = ["doctor --env CartPole-v1 --policy wires:policy_for", "doctor run"]
    done = subprocess.run(
        [sys.executable, "-c", code, *commands], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "[0, 2]"
    (missing,) = done.stderr.splitlines()
    assert "run holds no run" in missing
