"""Options that are left to recurl, on a machine without a GPU and on one that pretends to have one."""

from __future__ import annotations

import copy
import json
import pickle
import random
import re
import time
from dataclasses import dataclass, replace

import gymnasium as gym
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from recurl.cli import sweep
from recurl.cli.main import main
from recurl.cli.sources import plain, read_sources, with_defaults
from recurl.cli.train import read_run
from recurl.core.errors import ArgumentError
from recurl.envs import TensorEnv
from recurl.envs.tasks import TMaze
from recurl.trainers import ALGORITHMS, A2CConfig, DQNConfig, PPOConfig, RunConfig, SACConfig
from recurl.trainers.algorithms.options_file import options_for, preset_names, read_preset, write_options_file
from recurl.trainers.machine import describe

TASK = "recurl/TMaze-v0"
KINDS = [kind for kind in ALGORITHMS if kind != "distill"]  # a student is on a GPU only if it is asked for
MINE = "examples.mingru:MinGRU"
LARGE = {"total_steps": 20_000_000, "hidden_size": 256}
FITTED = ("device", "num_envs", "env_workers", "env_groups", "cuda_graph", "compile", "shared_trunk")
GAPS = "tests.trainers.test_machine:Waiting-v0"
SLOW = {"env": GAPS, "env_kwargs": ("seconds=0.004",), "total_steps": 100_000}


class Waiting(gym.Env):
    """Environment whose steps take a given time."""

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        Waiting.steps += 1
        time.sleep(self.seconds)
        return self.observation_space.sample(), 0.0, Waiting.steps % 5 == 0, False, {}


class Pictures(Waiting):
    """The same, with images."""

    observation_space = gym.spaces.Dict({"view": gym.spaces.Box(0, 255, (64, 64, 3), "uint8")})


class Strict(Waiting):
    """Environment that draws from global generators, and refuses all actions."""

    def step(self, action):
        random.random(), torch.rand(1)
        raise ValueError(action)


gym.register("Waiting-v0", Waiting)
gym.register("Pictures-v0", Pictures)
gym.register("Strict-v0", Strict)


@dataclass(frozen=True, kw_only=True)
class OwnConfig(PPOConfig):
    """Options of an algorithm that isn't recurl's."""

    algorithm = "own"
    num_envs: int = 32


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU, and eight cores."""
    pretend(monkeypatch)


def pretend(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device=None: "H100")
    monkeypatch.setattr("recurl.trainers.machine.core_count", lambda: 8)


def fitted(config):
    return {name: getattr(config, name) for name in FITTED if hasattr(config, name)}


def env_of(kind):
    return "recurl/MaskedPendulum-v1" if kind in ("sac", "td3") else TASK


ON_CPU = {"device": "cpu", "env_workers": 0, "env_groups": 1, "cuda_graph": False, "compile": False}


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gpu_runs_are_on_the_cpu(kind):
    config = ALGORITHMS[kind].config(env=env_of(kind), **LARGE)
    expected = {**ON_CPU, "num_envs": 8 if kind in ("ppo", "sac", "td3") else 16}
    assert {name: fitted(config)[name] for name in expected} == expected
    assert describe(config) is None


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_gpu_small_runs_are_on_the_cpu_and_large_ones_on_the_gpu(kind):
    make = ALGORITHMS[kind].config
    learns_from_batches = kind in ("ppo", "a2c", "impala")
    small, large = make(env=env_of(kind), total_steps=3_000), make(env=env_of(kind), **LARGE)
    assert (small.device, small.cuda_graph, small.num_envs) == ("cpu", False, make.usual_envs)
    assert (large.device, large.cuda_graph, large.compile) == ("cuda", True, True)
    assert (large.num_envs > make.usual_envs) == learns_from_batches
    assert re.fullmatch(
        r"On the CPU: \d+ environments; expected to take .*, against .*\(--device cuda\)\.", describe(small)
    )
    how = r"On the GPU \(H100\): [\d,]+ environments as tensors, captured and compiled; expected to take \d+ (s|min|h)"
    more = r" \(\d+ s more the first time, to compile\), against \d+ (min|h) on the CPU \(--device cpu\)\."
    assert re.fullmatch(how + more, describe(large))


@pytest.mark.usefixtures("gpu")
def test_environments_of_jax_are_on_the_gpu_if_jax_is(monkeypatch):
    options = {"env": "jax:gymnax/CartPole-v1", **LARGE}
    monkeypatch.setattr("recurl.trainers.machine._jax_has_gpu", lambda: False)
    assert "not on a GPU, which needs JAX with support for GPUs" in (describe(PPOConfig(**options)) or "")
    monkeypatch.setattr("recurl.trainers.machine._jax_has_gpu", lambda: True)
    config = PPOConfig(**options)
    assert (config.device, config.cuda_graph, config.num_envs > 8) == ("cuda", True, True)
    assert "environments as tensors" in (describe(config) or "")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("total_steps", [150_000, 3_000_000, 10**8, 10**10])
@pytest.mark.parametrize("kind", ["ppo", "a2c", "impala"])
def test_environments_on_a_gpu_leave_a_run_its_updates(kind, total_steps):
    make = ALGORITHMS[kind].config
    config = make(env=TASK, device="cuda", total_steps=total_steps)
    assert config.num_envs in [2**power for power in range(3, 13)]
    assert config.num_envs == make.usual_envs or config.updates >= 150
    assert config.num_envs == 4096 or config.updates < 4 * max(150, 2400 // config.work(0).gradient_steps)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "given",
    [
        {"device": "cpu"},
        {"device": "cuda"},
        {"device": "cuda:0"},
        {"num_envs": 24},
        {"env_workers": 0},
        {"env_groups": 1},
        {"cuda_graph": False},
        {"compile": False},
        {"shared_trunk": True},
        {"shared_trunk": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [{"total_steps": 20_000}, LARGE])
def test_what_is_given_is_kept(given, size):
    config = PPOConfig(env=TASK, **size, **given)
    assert given.items() <= fitted(config).items()
    assert None not in fitted(config).values()
    assert not given.keys() & config.choice.values.keys()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("kind", "options", "graph", "compiled", "reason"),
    [
        (PPOConfig, {}, True, True, "captured and compiled"),
        (PPOConfig, {"backend": "pad"}, False, False, "not captured, which needs --backend fastest or triton"),
        (PPOConfig, {"backend": "loop"}, False, False, "not captured, which needs --backend fastest or triton"),
        (
            PPOConfig,
            {"sequence_length": 48},
            False,
            False,
            "not captured or compiled, which needs minibatches of equal size",
        ),
        (
            PPOConfig,
            {"minibatches": 5},
            False,
            False,
            "not captured or compiled, which needs minibatches of equal size",
        ),
        (PPOConfig, {"overlap": True, "env_workers": 2}, False, False, "needs batches that aren't collected in a sec"),
        (PPOConfig, {"minibatches": 5, "compile": True}, False, True, "compiled, not captured, which needs minibatch"),
        (PPOConfig, {"cuda_graph": False}, False, True, "8 environments on the host, compiled."),
        (PPOConfig, {"cell": MINE}, False, False, "not captured, which needs a built-in cell"),
        (PPOConfig, {"cell": "none", "backend": "pad"}, True, True, "captured and compiled"),
        (DQNConfig, {"drawn_on": "host"}, False, False, "not captured or compiled, which needs slices of equal len"),
        (DQNConfig, {"refresh_states": True}, False, False, "which needs --drawn-on device, which doesn't support"),
        (OwnConfig, {}, False, False, "not captured or compiled, which needs an algorithm of recurl's"),
    ],
)
def test_a_gpu_captures_and_compiles_what_it_can(kind, options, graph, compiled, reason):
    config = kind(env="CartPole-v1", device="cuda", **options)
    assert (config.cuda_graph, config.compile) == (graph, compiled)
    assert reason in describe(config)
    assert "to compile)" not in describe(config) or compiled


@pytest.mark.usefixtures("gpu")
def test_what_is_turned_off_needs_no_reason():
    config = PPOConfig(env=TASK, device="cuda", compile=False, cuda_graph=False, hidden_size=32)
    assert describe(config).startswith("On the GPU (H100): 8 environments as tensors; expected to take ")
    assert "to compile" not in describe(config)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "--cuda-graph needs --device cuda, got cpu"),
        ({"device": "cuda", "backend": "pad"}, "--cuda-graph needs --backend fastest or triton"),
        ({"device": "cuda", "minibatches": 5}, "--cuda-graph needs minibatches of equal size"),
    ],
)
def test_a_graph_that_is_asked_for_and_impossible_is_an_error(options, message):
    with pytest.raises(ArgumentError, match=message):
        PPOConfig(env=TASK, cuda_graph=True, **options)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("env", [TASK, "CartPole-v1"])
def test_a_graph_that_is_asked_for_asks_for_a_gpu(env):
    config = PPOConfig(env=env, total_steps=3_000, cuda_graph=True)
    assert config == PPOConfig(env=env, total_steps=3_000, device="cuda")
    assert config.device == "cuda"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cell": MINE}, "which needs a built-in cell, unless it is asked for (--device cuda)"),
        ({"cell": "slstm"}, "a cell other than slstm, which loops over single steps, unless it is asked for (--dev"),
        ({"overlap": True}, "which needs a single process, unless"),
        ({"collectors": "ray:2"}, "which needs a single process, unless"),
        ({"backend": "cpu"}, "which needs another backend than cpu"),
        ({"env": "tests.trainers.test_machine:Strict-v0"}, "which needs an environment that takes random actions, un"),
        ({"env": TMaze}, "which needs an environment with an id, unless"),
        ({"env": lambda: gym.make("CartPole-v1")}, "which needs an environment with an id, unless"),
    ],
)
def test_what_is_known_too_little_is_on_a_gpu_only_if_asked_for(options, reason):
    config = PPOConfig(**{"env": TASK, **LARGE, **options})
    assert fitted(config) == {**ON_CPU, "num_envs": 8, "shared_trunk": True}
    assert describe(config).startswith("On the CPU: 8 environments, not on a GPU, ")
    assert reason in describe(config)


@pytest.mark.usefixtures("gpu")
def test_a_loop_over_steps_is_captured_but_compiled_only_if_asked_for():
    config = PPOConfig(env=TASK, device="cuda", cell="slstm", **LARGE)
    assert (config.cuda_graph, config.compile) == (True, False)
    assert "captured, not compiled, which needs a cell other than slstm" in describe(config)
    assert PPOConfig(env=TASK, device="cuda", cell="slstm", compile=True, **LARGE).compile


@pytest.mark.usefixtures("gpu")
def test_own_algorithms_keep_their_defaults():
    config = OwnConfig(env=TASK, **LARGE)
    assert fitted(config) == {**ON_CPU, "num_envs": 32, "shared_trunk": True}
    assert "needs an algorithm of recurl's" in describe(config)
    on_gpu = OwnConfig(env=TASK, device="cuda", **LARGE)
    assert (on_gpu.num_envs, on_gpu.cuda_graph, on_gpu.compile) == (32, False, False)
    assert OwnConfig(env=TASK, device="cuda", cuda_graph=True, compile=True).cuda_graph


@pytest.mark.usefixtures("gpu")
def test_ranks_of_torchrun_measure_nothing_and_need_a_gpu_each(monkeypatch):
    one = PPOConfig(env=TASK, device="cuda", **LARGE)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    before = Waiting.steps
    slow, task = PPOConfig(**SLOW), PPOConfig(env=TASK, **LARGE)
    assert Waiting.steps == before
    assert fitted(slow) == fitted(task) == {**ON_CPU, "num_envs": 8, "shared_trunk": True}
    assert "which needs a single rank or a task, unless it is asked for" in describe(slow)
    assert "not on a GPU, which needs one for each rank (--device cuda)." in describe(task)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert fitted(PPOConfig(env=TASK, **LARGE)) == fitted(PPOConfig(env=TASK, device="cuda", **LARGE))
    assert 4 * PPOConfig(env=TASK, **LARGE).num_envs == one.num_envs  # --total-steps are those of all ranks
    monkeypatch.delenv("RANK")  # set by a cluster's job, not by torchrun
    assert PPOConfig(env=TASK, **LARGE) == one


@pytest.mark.usefixtures("gpu")
def test_slow_environments_get_workers_and_fast_ones_none():
    slow, fast = PPOConfig(**SLOW), PPOConfig(env="CartPole-v1", total_steps=20_000)
    assert slow.env_workers == 8
    assert " environments in 8 worker processes" in describe(slow)
    assert (fast.device, fast.env_workers, fast.env_groups) == ("cpu", 0, 1)
    assert "against" in describe(fast)
    assert PPOConfig(**SLOW, env_workers=0).env_workers == 0
    assert PPOConfig(**SLOW, vectorization="sync").env_workers == 0
    assert PPOConfig(**SLOW, device="cuda").env_workers == 0  # only what is compared is measured


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_groups_need_workers_that_were_asked_for(device):
    with pytest.raises(ArgumentError, match=r"--env-groups 2 needs --env-workers, .*, got 0 workers"):
        PPOConfig(**SLOW, env_groups=2, device=device)
    assert PPOConfig(**SLOW, env_groups=2, env_workers=4, device=device).env_workers == 4


@pytest.mark.usefixtures("gpu")
def test_measuring_draws_no_random_numbers():
    random.seed(0), torch.manual_seed(0)
    PPOConfig(env="tests.trainers.test_machine:Strict-v0")
    drawn = random.random(), torch.rand(1)
    random.seed(0), torch.manual_seed(0)
    assert drawn == (random.random(), torch.rand(1))


@pytest.mark.usefixtures("gpu")
def test_slow_environments_of_a_large_network_alternate_in_groups():
    config = PPOConfig(**SLOW, num_envs=32, hidden_size=2048)
    assert (config.device, config.env_workers, config.env_groups) == ("cuda", 8, 2)
    assert "in 8 worker processes in 2 groups on the host, captured and compiled" in describe(config)


@pytest.mark.usefixtures("gpu")
def test_images_cost_convolutions():
    options = {"env": "tests.trainers.test_machine:Pictures-v0", "total_steps": 20_000}
    seconds = [PPOConfig(**options, encoder=encoder).choice.seconds["cpu"] for encoder in ("auto", "mlp")]
    assert seconds[0] > 4 * seconds[1]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "options",
    [
        {"env": "Nope-v1"},
        {"env": "no_module:Nope-v1"},
        {"env": GAPS, "env_kwargs": ("minutes=3",)},
        {"env": GAPS, "wrapper": ("no_module:Nope",)},
        {"env": TASK, "env_kwargs": ("corridor_length=-3",)},
    ],
    ids=str,
)
def test_environments_that_cannot_be_created_are_an_error_where_they_are_created(options):
    assert fitted(PPOConfig(**options)) == {**ON_CPU, "num_envs": 8, "shared_trunk": True}


def test_an_environment_object_has_a_device(gpu):
    env = TensorEnv(TMaze(), num_envs=8, device="cpu")
    for options in ({}, LARGE):
        config = PPOConfig(env=env, **options)
        assert (config.device, config.num_envs, describe(config)) == ("cpu", 8, None)


@pytest.mark.usefixtures("gpu")
def test_other_accelerators_are_not_taken_for_gpus():
    config = PPOConfig(env=TASK, device="mps", **LARGE)
    assert fitted(config) == {**ON_CPU, "device": "mps", "num_envs": 8, "shared_trunk": True}


def test_large_gradient_steps_have_separate_trunks():
    large = PPOConfig(env=TASK, num_envs=512, total_steps=10**6)
    assert (large.frames_per_batch // large.minibatches, large.shared_trunk) == (16_384, False)
    assert PPOConfig(env=TASK, num_envs=511, total_steps=10**6).shared_trunk
    assert PPOConfig(env=TASK, num_envs=512, minibatches=8, total_steps=10**6).shared_trunk
    assert not A2CConfig(env=TASK, num_envs=1024, total_steps=10**6).shared_trunk
    assert SACConfig(env=env_of("sac"), num_envs=4096, total_steps=10**6).shared_trunk
    assert PPOConfig(env=TASK, num_envs=512, total_steps=10**6, shared_trunk=True).shared_trunk


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("options", [{"total_steps": 20_000}, LARGE])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_keep_what_was_chosen(kind, options, monkeypatch):
    config = ALGORITHMS[kind].config(env=env_of(kind), **options)
    written = json.loads(json.dumps(config.to_dict()))
    same = [replace(config), copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))]
    assert [describe(each) for each in same[1:]] == 3 * [describe(config)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # such as in a worker, or on another machine
    same += [replace(config), type(config).from_dict(written), config.with_env(config.env)]
    assert [fitted(each) for each in same] == len(same) * [fitted(config)]
    assert all(each == config for each in same)
    assert config.on_cpu().device == "cpu"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", KINDS)
def test_options_of_older_versions_mean_what_they_meant(kind):
    make = ALGORITHMS[kind].config
    written = make(env=env_of(kind), device="cpu", num_envs=2048, **LARGE).to_dict()
    older = {name: value for name, value in written.items() if name not in FITTED}
    config = make.from_dict(older)
    assert {**ON_CPU, "num_envs": make.usual_envs}.items() <= fitted(config).items()
    assert fitted(config).get("shared_trunk", True)


def test_settled_values_respect_an_algorithms_own_defaults():
    assert OwnConfig.settled() == {name: value for name, value in PPOConfig.settled().items() if name != "num_envs"}
    assert "shared_trunk" not in DQNConfig.settled()
    assert OwnConfig.from_dict({"env": TASK}).num_envs == 32
    kind = with_defaults(PPOConfig, {"num_envs": 4})
    assert kind.from_dict({"env": TASK}).num_envs == 4


@pytest.mark.usefixtures("gpu")
def test_options_of_the_command_line_keep_the_choice(tmp_path):
    kind = with_defaults(PPOConfig, {"env": TASK, "compile": False, **LARGE})
    config = plain(PPOConfig, kind())
    assert type(config) is PPOConfig
    assert (config.device, config.compile, config.num_envs) == ("cuda", False, kind().num_envs)
    assert "against" in describe(config)
    write_options_file(tmp_path / "options.toml", config)
    assert "num_envs = 1024" in (tmp_path / "options.toml").read_text().splitlines()
    write_options_file(tmp_path / "options.toml", config, chosen=False)
    text = (tmp_path / "options.toml").read_text().splitlines()
    assert {"# num_envs = 1024  # chosen by recurl", '# device = "cuda"  # chosen by recurl'} < set(text)
    assert {"compile = false", "# cuda_graph = true  # chosen by recurl"} < set(text)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("options", [LARGE, {"total_steps": 3_000}])
def test_the_command_line_leaves_open_what_a_file_gives(options):
    kind = with_defaults(PPOConfig, {"env": TASK, "device": "cpu", "num_envs": 4, "compile": False, **options})
    config = plain(PPOConfig, kind(device="auto", num_envs=None, compile=None))
    assert config == PPOConfig(env=TASK, **options)
    assert describe(config) == describe(PPOConfig(env=TASK, **options))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", preset_names())
def test_presets_keep_their_values(name, monkeypatch):
    monkeypatch.setattr("recurl.trainers.algorithms.options_file._installed", lambda package: True)
    preset = read_preset(name)
    kind = ALGORITHMS[preset.algorithm].config
    values = options_for(kind, preset)
    config = kind(**values)
    assert {each: getattr(config, each) for each in values} == values
    assert config.shared_trunk if hasattr(config, "shared_trunk") else True


def jobs(folder, *words):
    arguments = ["ppo", "--env", TASK, "--run-dir", str(folder), "--total-steps", "20000000", *words]
    return [job.config for job in sweep.read(arguments).jobs]


@pytest.mark.usefixtures("gpu")
def test_runs_of_a_sweep_differ_in_what_it_varies(tmp_path):
    made = jobs(tmp_path, "--set", "hidden_size=256,8", f"cell=lstm,{MINE}")
    assert {(config.device, config.num_envs) for config in made} == {("cuda", 1024)}
    assert [config.cuda_graph for config in made] == [True, False, True, False]
    given = jobs(tmp_path, "--set", "device=cuda,cpu", "num_envs=8,16")
    assert [(config.device, config.num_envs) for config in given] == [
        ("cuda", 8), ("cuda", 16), ("cpu", 8), ("cpu", 16)
    ]  # fmt: skip
    assert [config.env_workers for config in jobs(tmp_path, "--num-envs", "32")] == [0]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("varied", "workers"), [("num_envs=8,12", 0), ("hidden_size=8,16", 8)])
def test_a_sweep_over_environments_has_no_workers_that_only_divide_the_first_ones(varied, workers, tmp_path):
    words = ["ppo", "--env", GAPS, "--env-kwargs", "seconds=0.004", "--run-dir", str(tmp_path), "--set", varied]
    assert [job.config.env_workers for job in sweep.read(words).jobs] == [workers, workers]


def test_a_continued_sweep_keeps_what_was_chosen(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        pretend(patched)
        first = sweep.read(words := ["ppo", "--env", TASK, "--run-dir", str(tmp_path), "--total-steps", "20000000"])
        with sweep.Sweep(tmp_path, first.jobs, print).hold():
            pass
    assert not torch.cuda.is_available()
    again = sweep.read(words)  # such as after a measurement that came out differently
    assert again == first
    with sweep.Sweep(tmp_path, again.jobs, print).hold():
        pass
    (tmp_path / "sweep.json").write_text("[]")
    assert sweep.read(words).jobs[0].config.device == "cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("gpu", "no_curves")
def test_a_run_prints_what_was_chosen(tmp_path, capsys):
    small = ["--env", TASK, "--total-steps", "1024", "--hidden-size", "8", "--eval-episodes", "2", "--logger", "none"]
    assert main(["train", "ppo", *small, "--run-dir", str(tmp_path / "one")]) == 0
    line = r"\nOn the CPU: 8 environments; expected to take \d s, against \d s on the GPU \(--device cuda\)\.\n"
    assert re.search(line, capsys.readouterr().out)
    assert main(["train", "ppo", *small, "--device", "cpu", "--run-dir", str(tmp_path / "two")]) == 0
    assert "On the CPU" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("no_curves")
def test_only_a_new_run_says_what_was_chosen_and_how_long_it_takes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("recurl.cli.train.describe", lambda config: "A line.")
    small = ["--env", TASK, "--total-steps", "1024", "--hidden-size", "8", "--eval-episodes", "2", "--logger", "none"]
    assert main(["train", "ppo", *small, "--run-dir", str(tmp_path)]) == 0
    assert "\nA line.\n" in capsys.readouterr().out
    assert main(["train", "--resume", str(tmp_path), "--total-steps", "2048"]) == 0
    assert "A line." not in capsys.readouterr().out


class BareConfig(RunConfig):
    """Options of an algorithm that shares nothing with recurl's."""

    algorithm = "bare"


def test_an_algorithm_without_those_of_recurl_takes_what_suits_a_cpu(monkeypatch):
    alone = BareConfig(env=TASK, **LARGE)
    assert describe(alone) is None, "this machine leaves no choice"
    pretend(monkeypatch)
    config = BareConfig(env=TASK, **LARGE)
    assert config == alone
    assert (config.device, config.num_envs, config.env_workers) == ("cpu", 8, 0)
    assert "not on a GPU, which needs an algorithm of recurl's" in (describe(config) or "")
    assert BareConfig(env=TASK, device="cuda", **LARGE).device == "cuda"
    env = TensorEnv(TMaze(), num_envs=4, device="cpu")
    assert BareConfig(env=env, num_envs=4, **LARGE).device == "cpu"


OPEN = "# compile = false  # chosen by recurl"


@pytest.mark.parametrize(
    ("words", "line"), [([], OPEN), (["--compile"], "compile = true"), (["--no-compile"], "compile = false")]
)
def test_switches_on_the_command_line(words, line, tmp_path):
    path = tmp_path / "options.toml"
    assert main(["train", "ppo", "--env", TASK, *words, "--save-config", str(path)]) == 0
    assert line in path.read_text().splitlines()


def test_saved_options_of_one_machine_fit_another(tmp_path, monkeypatch, capsys):
    path = tmp_path / "options.toml"
    words = ["train", "ppo", "--env", TASK, "--total-steps", "20M", "--hidden-size", "128"]
    pretend(monkeypatch)
    assert main([*words, "--save-config", str(path)]) == 0
    assert '# device = "cuda"  # chosen by recurl' in path.read_text().splitlines()
    monkeypatch.undo()
    assert main(["train", "--config", str(path), "--print-model"]) == 0
    config = read_run(["--config", str(path)], read_sources(["--config", str(path)]), prog="recurl train").options
    assert (config.device, config.num_envs, config.cuda_graph, config.compile) == ("cpu", 8, False, False)
    assert "steps" in capsys.readouterr().out


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([PPOConfig, A2CConfig, DQNConfig]),
    options=st.fixed_dictionaries(
        {"total_steps": st.integers(1, 10**8)},
        optional={
            "rollout_steps": st.integers(1, 300),
            "minibatches": st.integers(1, 80),
            "sequence_length": st.integers(1, 300),
            "num_envs": st.integers(1, 200),
            "device": st.sampled_from(["auto", "cuda"]),
            "backend": st.sampled_from(["fastest", "pad", "cpu"]),
            "vectorization": st.sampled_from(["auto", "native", "device"]),
        },
    ),
)
@example(kind=PPOConfig, options={"total_steps": 10**6, "minibatches": 33})
def test_a_gpu_makes_no_options_impossible(kind, options, monkeypatch):
    if kind is not PPOConfig:
        options = {name: value for name, value in options.items() if name not in ("minibatches", "sequence_length")}
    try:
        kind(env=TASK, **{**options, "device": "cpu"})
    except ArgumentError:
        return
    with monkeypatch.context() as patched:
        pretend(patched)
        if options.get("backend") == "cpu" and options.get("device") == "cuda":
            with pytest.raises(ArgumentError, match="--backend cpu needs --device cpu"):
                kind(env=TASK, **options)
            return
        config = kind(env=TASK, **options)
    assert not config.cuda_graph or (config.graph_obstacle is None and config.device == "cuda")
    assert not config.compile or config.compile_obstacle is None
    assert config.updates >= 1
    assert config.num_envs == options.get("num_envs", config.num_envs)
    assert not fitted(config).keys() - {*FITTED}
    assert None not in fitted(config).values()
