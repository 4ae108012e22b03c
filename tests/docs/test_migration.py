"""The claims of docs/migrating_from_torchrl.md on names, arguments and errors."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl import collectors
from recurl.collectors import Collector
from recurl.core.errors import ArgumentTypeError, MissingAttributeError, MissingNameError, RecurlError
from recurl.core.ranges import flag
from recurl.core.torchrl_names import ABSENT, INSTEAD
from recurl.data import SequenceMinibatches, SliceSampler
from recurl.envs import Compose, GymEnv, InitTracker, TensorDictPrimer, TransformedEnv
from recurl.modules import (
    LSTM,
    MLP,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from recurl.objectives import ClipPPOLoss, DQNLoss
from recurl.objectives.value import GAE
from recurl.trainers import OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "migrating_from_torchrl.md").read_text()


def rows(section: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    text = re.split("\n##+ ", PAGE.split(f"\n## {section}\n")[1])[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", rows("Import paths"), ids=lambda row: row[0])
def test_import_paths(row: list[str]) -> None:
    for module in quoted(row[0]):
        for name in quoted(row[1]):
            assert hasattr(importlib.import_module(module), name), name


@pytest.mark.parametrize("function", [GAE, SliceSampler, DQNLoss, Collector])
def test_absent_arguments_are_absent(function: Callable[..., Any]) -> None:
    absent = {name for row in rows("Missing") if f"`{function.__name__}`" in row[0] for name in quoted(row[0])}
    assert absent.isdisjoint(inspect.signature(function).parameters)


def memory(name: str = "rs", out: str = "memory", **options: Any) -> LSTMModule:
    states = [f"{name}_h", f"{name}_c"]
    out_keys = [out, *(("next", key) for key in states)]
    return LSTMModule(3, 8, in_keys=["observation", *states], out_keys=out_keys, **options)


def policy_of(module: LSTMModule) -> TensorDictSequential:
    return TensorDictSequential(module, TensorDictModule(nn.Linear(8, 1), in_keys=["memory"], out_keys=["action"]))


def actor_of(*net: nn.Module) -> ProbabilisticActor:
    head = TensorDictModule(nn.Sequential(MLP(8, 2), *net), in_keys=["memory"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        TensorDictSequential(memory(), head),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )


def critic_of(name: str) -> TensorDictSequential:
    return TensorDictSequential(memory(name, "value"), ValueOperator(nn.Linear(8, 1), in_keys=["value"]))


def steps(count: int = 4, **entries: torch.Tensor) -> TensorDict:
    is_init = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict({"observation": torch.randn(count, 3), "is_init": is_init, **entries}, [count])


def sequences(module: LSTMModule, batch: TensorDict) -> None:
    with set_recurrent_mode(True):
        module(batch)


def pendulum(*transforms: Any) -> TransformedEnv:
    return TransformedEnv(GymEnv("Pendulum-v1"), Compose(InitTracker(), *transforms))


def step_without_step_mdp() -> None:
    module = memory()
    policy, env = policy_of(module), pendulum(module.make_tensordict_primer())
    td = env.reset()
    for _ in range(2):
        td = env.step(policy(td))


def a_critic_that_did_not_collect() -> None:
    actor, critic = actor_of(NormalParamExtractor()), critic_of("critic_rs")
    (batch,) = list(Collector(GymEnv("Pendulum-v1"), actor, frames_per_batch=16, total_frames=16))
    batch = GAE(0.99, 0.95, critic)(batch)
    for minibatch in SequenceMinibatches(batch, 2, slice_len=1):
        ClipPPOLoss(actor, critic)(minibatch)


def iterate_after_shutdown() -> None:
    collector = Collector(GymEnv("Pendulum-v1"), policy_of(memory()), frames_per_batch=4, total_frames=8)
    next(iter(collector))
    collector.shutdown()
    next(iter(collector))


def use_the_collectors_environment() -> None:
    policy, env = policy_of(memory()), GymEnv("Pendulum-v1")
    for _ in Collector(env, policy, frames_per_batch=4, total_frames=8):
        env.rollout(2)


def primer_of_ones() -> TensorDictPrimer:
    return TensorDictPrimer(memory().make_tensordict_primer().primers, default_value=1.0)


def q_network() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action_value"])


def from_import(module: str, name: str) -> None:
    exec(f"from {module} import {name}")


CASES: dict[str, Callable[[], Any]] = {
    "`module.set_recurrent_mode()`": lambda: memory().set_recurrent_mode(),
    "`module.recurrent_mode = True`": lambda: setattr(memory(), "recurrent_mode", True),
    "`td = env.step(policy(td))` in a loop": step_without_step_mdp,
    "a head without a scale": lambda: list(
        Collector(GymEnv("Pendulum-v1"), actor_of(), frames_per_batch=4, total_frames=4)
    ),
    "`ClipPPOLoss` with a deterministic policy": lambda: ClipPPOLoss(policy_of(memory()), critic_of("critic_rs")),
    "minibatches for a critic that did not collect": a_critic_that_did_not_collect,
    "actor and critic with the same state keys": lambda: ClipPPOLoss(actor_of(NormalParamExtractor()), critic_of("rs")),
    "a rollout with the collector's environment between two batches": use_the_collectors_environment,
    "iterating a collector after `shutdown()`": iterate_after_shutdown,
    "no `InitTracker`, no collector to add it": lambda: GymEnv("Pendulum-v1").rollout(2, policy_of(memory())),
    "no primer, no collector to add it": lambda: pendulum().rollout(2, policy_of(memory())),
    "a primer with a value other than zero": lambda: Collector(
        pendulum(primer_of_ones()), policy_of(memory()), frames_per_batch=4
    ),
    "a single step in recurrent mode": lambda: sequences(memory(), steps()[0]),
    "`is_init` of floats": lambda: memory()(steps(is_init=torch.zeros(4, 1))),
    "a batch without `is_init`": lambda: memory()(steps().exclude("is_init")),
    "one of two states": lambda: memory()(steps(rs_h=torch.zeros(4, 1, 8))),
    "options together with a wrapped `lstm=`": lambda: LSTMModule(
        lstm=nn.LSTM(3, 8, batch_first=True), num_layers=2, in_key="observation", out_key="memory"
    ),
    '`recurrent_recompute="full"` with `"pad"`': lambda: memory(recurrent_recompute="full"),
    'tensors on the CPU with `"triton"`': lambda: sequences(memory(recurrent_backend="triton"), steps()),
    "`end_key` together with `traj_key` in `SliceSampler`": lambda: SliceSampler(
        slice_len=2, traj_key=("collector", "traj_ids"), end_key=("next", "done")
    ),
    "`from recurl.collectors import SyncDataCollector`": lambda: from_import("recurl.collectors", "SyncDataCollector"),
    "`from recurl.envs.utils import _StepMDP`": lambda: from_import("recurl.envs.utils", "_StepMDP"),
    '`DQNLoss(...).make_value_estimator("gae")`': lambda: DQNLoss(q_network()).make_value_estimator("gae", gamma=0.9),
    "`loss.set_keys(...)` with a name that the loss doesn't read": lambda: GAE(0.99, 0.95, None).set_keys(
        sample_log_prob="log_prob"
    ),
    "`GAE(..., shifted=True)`": lambda: GAE(0.99, 0.95, None, shifted=True),
    '`DQNLoss(..., action_space="one-hot")`': lambda: DQNLoss(q_network(), action_space="one-hot"),
}


@pytest.mark.parametrize("row", rows("Calls that raise errors"), ids=lambda row: row[0])
def test_what_raises(row: list[str]) -> None:
    (text,) = quoted(row[1])
    with pytest.raises(RecurlError, match=re.escape(text)):
        CASES[row[0]]()


def test_every_case_is_on_the_page() -> None:
    assert [row[0] for row in rows("Calls that raise errors")] == list(CASES)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in ABSENT for name in ABSENT[module]])
def test_absent_names_say_what_to_write(module: str, name: str) -> None:
    found = importlib.import_module(module)
    assert not hasattr(found, name)
    assert name not in dir(found)
    said = re.escape(f"{module} has no {name}: {ABSENT[module][name]}.")
    with pytest.raises(MissingNameError, match=f"^{said}$"):
        from_import(module, name)
    with pytest.raises(MissingAttributeError, match=f"^{said}$"):
        getattr(found, name)


PACKAGES = ["collectors", "data", "data.replay_buffers", "envs", "envs.transforms", "envs.utils", "modules"]
PACKAGES += ["objectives", "objectives.value", "trainers"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_torchrl_is_there_or_says_what_to_write(package: str) -> None:
    theirs = pytest.importorskip(f"torchrl.{package}")
    ours = importlib.import_module(f"recurl.{package}")
    public = [name for name in getattr(theirs, "__all__", vars(theirs)) if not name.startswith("_")]
    names = {name for name in public if not inspect.ismodule(getattr(theirs, name))}
    assert len(names) > 5
    assert sorted(name for name in names if not hasattr(ours, name) and name not in ABSENT[f"recurl.{package}"]) == []


@pytest.mark.parametrize(
    "advice", sorted({advice for names in (*ABSENT.values(), INSTEAD) for advice in names.values()})
)
def test_what_to_write_exists(advice: str) -> None:
    for name in re.findall(r"\b(?:recurl|gymnasium|tensordict)(?:\.\w+)+", advice):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_unknown_names_are_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchCollector'"):
        _ = collectors.NoSuchCollector
    with pytest.raises(ImportError, match="cannot import name 'NoSuchCollector'"):
        from_import("recurl.collectors", "NoSuchCollector")


def test_the_names_of_the_page_are_absent_or_there() -> None:
    table = PAGE.split("\n### Names\n")[1].split("\n## ")[0]
    names = {name for line in table.splitlines() if line.startswith("| `") for name in quoted(line.split(" | ")[0])}
    assert len(names) > 20
    assert names <= {name for names in ABSENT.values() for name in names}


def test_pixels_come_from_a_wrapper_of_gymnasium() -> None:
    (row,) = (row for row in rows("Missing") if "from_pixels" in row[0])
    with closing(eval(quoted(row[1])[0], {"GymEnv": GymEnv, "gymnasium": gymnasium, "name": "CartPole-v1"})) as env:
        assert env.reset()["observation"].shape == (400, 600, 3)


@pytest.mark.parametrize("name", ["deactivate_vmap", "vectorized", "time_dim"])
def test_absent_arguments_say_what_to_write(name: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"GAE has no argument '{name}': leave it out"):
        GAE(0.99, 0.95, None, **{name: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'shiftet'"):
        GAE(0.99, 0.95, None, shiftet=True)


def test_the_network_inside_is_recurls_own() -> None:
    module = memory()
    assert not isinstance(module.lstm, nn.LSTM)
    assert isinstance(module.lstm, LSTM)
    nn.LSTM(3, 8).load_state_dict(module.lstm.state_dict())


def test_the_options_beside_those_of_other_libraries_exist() -> None:
    page = (Path(__file__).parents[2] / "docs" / "from_sb3.md").read_text()
    cells = [line.strip("|").split(" | ")[-1] for line in page.splitlines() if line.startswith("| ")]
    flags = {found for cell in cells for found in re.findall(r"--[a-z-]+", cell)}
    assert len(flags) > 40
    assert flags <= {flag(field.name) for kind in OPTIONS.values() for field in fields(kind)}
