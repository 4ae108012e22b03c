"""Correct policies pass every check; every deliberately wrong wiring fails its specific check."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl.collectors import Collector
from recurl.core.specs import Unbounded
from recurl.diagnostics import (
    CheckResult,
    check_batch,
    check_primers,
    check_state_keys,
    check_stepping,
    check_tracker,
    check_wiring,
)
from recurl.envs import GymEnv, InitTracker, TensorDictPrimer
from recurl.modules import GRUModule, LSTMModule, OneHotCategorical, ProbabilisticActor
from recurl.sequences.mode import set_recurrent_mode
from tests.diagnostics.failing import by_name, failing
from tests.diagnostics.policies import (
    CELLS,
    SERVED,
    each_cell,
    each_served,
    make_env,
    make_policy,
    policy_of,
    tracked,
    wired,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("served", "rows"), each_served(SERVED, [None, 1, 3]))
def test_healthy_policies_pass(served: tuple[str, str], rows: int | None) -> None:
    cell, backend = served
    policy = make_policy(cell, num_layers=2, recurrent_backend=backend)
    results = check_wiring(policy, wired(policy, rows))
    assert [str(result) for result in results if not result.passed] == []
    assert [result.name for result in results] == [
        "state_keys",
        "tracker",
        "primers",
        "collection",
        "stepping",
        "is_init",
        "traj_ids",
        "mode",
        "repeat",
        "rows",
        "feedback",
        "reset",
        "memory",
        "action",
        "leak",
        "replay",
        "start",
        "log_prob",
        "gradient",
    ]
    assert all(module.training for module in policy.modules())


def test_a_stochastic_actor_is_compared_by_its_log_probability() -> None:
    lstm = LSTMModule(4, 8, in_key="observation", out_key="features")
    trunk = Seq(lstm, Mod(nn.Linear(8, 2), ["features"], ["logits"]))
    actor = ProbabilisticActor(trunk, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
    results = by_name(check_wiring(actor, wired(actor)))
    assert all(result.passed for result in results.values())
    assert "logits" in results["replay"].detail
    assert "action_log_prob" in results["log_prob"].detail
    batch = Collector(make_env(2), actor, frames_per_batch=40).collect()
    batch["action_log_prob"] += 0.1
    result = by_name(check_batch(actor, batch))["log_prob"]
    assert not result.passed
    assert result.detail.startswith("action_log_prob as collected and recomputed")


def test_two_trunks_and_double_precision() -> None:
    double = Mod(lambda x: x.double(), ["observation"], ["x"])
    trunks = [
        CELLS[cell](
            4, 8, in_keys=["x", *keys], out_keys=[f"{cell}_out", *(("next", k) for k in keys)], dtype=torch.float64
        )
        for cell, keys in (("lstm", ["h", "c"]), ("gru", ["g"]))
    ]
    head = Mod(nn.Linear(8, 2, dtype=torch.float64), ["gru_out"], ["logits"])
    policy = Seq(double, *trunks, head, Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"]))
    assert failing(policy, wired(policy)) == {}


def test_collector_wiring_can_be_requested() -> None:
    policy, env = make_policy(), make_env(2)
    assert failing(policy, env, auto_register_policy_transforms=True) == {}
    assert "is_init" not in env.observation_spec
    assert set(failing(policy, env)) == {"tracker", "primers", "collection"}


def test_a_vector_environment_that_resets_by_itself() -> None:
    policy = make_policy()
    env = make_env(3, InitTracker(), policy[0].make_tensordict_primer(), mode="SAME_STEP")
    assert failing(policy, env) == {}


def test_masked_cartpole_vectorised() -> None:
    policy = policy_of(GRUModule(2, 8, in_key="observation", out_key="features"))
    assert failing(policy, GymEnv("recurl/MaskedCartPole-v1", num_envs=3, policy=policy)) == {}


# -- wrong wirings: the check that must fail, its detail, its fix


@pytest.mark.parametrize(("cell", "rows"), each_cell([None, 3]))
def test_no_primer(cell: str, rows: int | None) -> None:
    failed = failing(make_policy(cell), tracked(rows))
    assert {"primers", "feedback", "replay"} <= set(failed)
    for name in ("primers", "feedback"):
        assert "no memory" in failed[name].detail
        assert "append_transform(get_primers_from_module(policy))" in failed[name].fix


@pytest.mark.parametrize("rows", [None, 3])
def test_no_tracker(rows: int | None) -> None:
    policy = make_policy()
    failed = failing(policy, make_env(rows, policy[0].make_tensordict_primer()))
    assert set(failed) == {"tracker", "collection"}
    assert "does not write is_init" in failed["tracker"].detail
    assert "append_transform(InitTracker())" in failed["tracker"].fix
    assert "MissingKeyError" in failed["collection"].detail


class Constant(InitTracker):
    def __init__(self, value: bool) -> None:
        super().__init__()
        self.value = value

    def _reset(self, tensordict: object, tensordict_reset: object) -> object:
        root = super()._reset(tensordict, tensordict_reset)
        return root.set("is_init", torch.full_like(root["is_init"], self.value))

    def _step(self, tensordict: object, next_tensordict: object) -> object:
        after = super()._step(tensordict, next_tensordict)
        return after.set("is_init", torch.full_like(after["is_init"], self.value))


@pytest.mark.parametrize("rows", [None, 3])
def test_tracker_always_false(rows: int | None) -> None:
    policy = make_policy()
    failed = failing(policy, make_env(rows, Constant(False), policy[0].make_tensordict_primer()))
    assert {"tracker", "is_init"} <= set(failed)
    assert "is always False" in failed["is_init"].detail
    assert "is_init is False after a reset" in failed["tracker"].detail
    assert all("InitTracker()" in failed[name].fix for name in ("tracker", "is_init"))


@pytest.mark.parametrize("rows", [None, 3])
def test_tracker_always_true(rows: int | None) -> None:
    policy = make_policy()
    failed = failing(policy, make_env(rows, Constant(True), policy[0].make_tensordict_primer()))
    assert "is always True" in failed["is_init"].detail
    assert "InitTracker()" in failed["is_init"].fix


@pytest.mark.parametrize("cell", each_cell())
def test_recurrent_by_default(cell: str) -> None:
    policy = make_policy(cell, default_recurrent_mode=True)
    failed = failing(policy, wired(policy))
    assert set(failed) == {"mode"}
    assert "runs sequences by default" in failed["mode"].detail
    assert "default_recurrent_mode=False" in failed["mode"].fix


class OwnMode(nn.Module):
    def __init__(self, policy: nn.Module, mode: bool) -> None:
        super().__init__()
        self.policy, self.mode = policy, mode
        self.in_keys, self.out_keys = policy.in_keys, policy.out_keys

    def forward(self, tensordict: object) -> object:
        with set_recurrent_mode(self.mode):
            return self.policy(tensordict)


@pytest.mark.parametrize("mode", [True, False])
def test_policy_that_sets_the_mode_itself(mode: bool) -> None:
    policy = OwnMode(make_policy(), mode)
    failed = failing(policy, wired(policy, 3))
    assert f"runs {'sequences' if mode else 'steps'}" in failed["mode"].detail
    assert "don't set the recurrent mode inside the policy" in failed["mode"].fix
    assert ("rows" if mode else "replay") in failed


@pytest.mark.parametrize("options", [{"default_value": 1.0}, {"random": True}])
def test_primer_that_is_not_zero(options: dict) -> None:
    policy = make_policy()
    primer = TensorDictPrimer(policy[0].make_tensordict_primer().primers, **options)
    failed = failing(policy, make_env(3, InitTracker(), primer))
    assert {"primers", "reset", "replay"} <= set(failed)
    assert "not zero after a reset" in failed["primers"].detail
    assert "not zero (up to" in failed["reset"].detail
    for name in ("primers", "reset"):
        assert "get_env_transforms_from_module(policy)" in failed[name].fix


@pytest.mark.parametrize("spec", [Unbounded(1, 8, dtype=torch.float64), Unbounded(1, 9)])
def test_primer_of_another_dtype_or_shape(spec: Unbounded) -> None:
    failed = failing(make_policy(), make_env(3, InitTracker(), TensorDictPrimer(recurrent_state=spec)))
    assert set(failed) == {"primers", "collection"}
    got = f"[3, {', '.join(map(str, spec.shape))}] {spec.dtype}"
    assert f"declares 'recurrent_state' as {got}, but the module needs [3, 1, 8]" in failed["primers"].detail
    assert "get_env_transforms_from_module(policy)" in failed["primers"].fix
    assert "UsageError" in failed["collection"].detail


def test_two_modules_share_a_state() -> None:
    modules = [
        GRUModule(size, 8, in_key=key, out_key=out) for size, key, out in ((4, "observation", "a"), (8, "a", "b"))
    ]
    policy = policy_of(*modules, features="b")
    failed = failing(policy, wired(policy))
    assert "share the state 'recurrent_state'" in failed["state_keys"].detail
    assert "in_keys=[value, 'other_recurrent_state']" in failed["state_keys"].fix
    assert "replay" in failed


class StepsOnly(nn.Module):
    """Handmade recurrent module that carries its state in the TensorDict but can't run sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 8)

    def forward(self, observation: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.cell(observation.reshape(-1, 4), h.reshape(-1, 8)).reshape(h.shape)
        return out, out


def test_hand_made_module_that_can_not_replay() -> None:
    policy = policy_of(Mod(StepsOnly(), ["observation", "h"], ["features", ("next", "h")]))
    failed = failing(policy, make_env(3, InitTracker(), TensorDictPrimer(h=Unbounded(8))))
    assert set(failed) == {"reset", "replay"}
    assert "with a zero and with another state differ" in failed["reset"].detail
    assert "GRUModule or CellModule" in failed["replay"].fix


def test_a_function_that_wraps_a_policy_is_recognized_by_its_outputs() -> None:
    policy = make_policy()
    assert failing(lambda td: policy(td), wired(policy)) == {}
    assert "primers" in failing(lambda td: policy(td), tracked())


def test_a_policy_that_fails_is_reported() -> None:
    policy = make_policy("gru", Mod(lambda x: x.reshape(7), ["features"], ["odd"]))
    failed = failing(policy, wired(policy))
    assert set(failed) == {"collection"}
    assert "can't be stepped: RuntimeError" in failed["collection"].detail


def test_feed_forward_policies_have_fewer_checks() -> None:
    policy = policy_of(Mod(nn.Linear(4, 8), ["observation"], ["features"]))
    results = check_wiring(policy, make_env(2))
    assert [result.name for result in results] == [
        "collection",
        "stepping",
        "recurrent",
        "repeat",
        "rows",
        "replay",
        "log_prob",
    ]
    assert all(result.passed for result in results)
    assert "it is feed-forward" in results[2].detail


def test_single_checks() -> None:
    policy = make_policy()
    assert check_state_keys(policy).passed
    assert check_tracker(tracked()).passed
    assert check_primers(policy, wired(policy)).passed
    flags = make_env(2, TensorDictPrimer(is_init=Unbounded(1)))
    assert "must be bool of shape [2, 1], got torch.float32" in check_tracker(flags).detail


def test_too_few_steps() -> None:
    with pytest.raises(ValueError, match="steps must be at least 8, got 7"):
        check_wiring(make_policy(), make_env(2), steps=7)


def test_the_text_of_a_result() -> None:
    assert str(CheckResult("reset", True, "seen")) == "ok    reset        seen"
    assert str(CheckResult("reset", False, "seen", "do")) == "FAIL  reset        seen\n      fix: do"


def test_stepping_on_plain_tensors_is_reported_or_its_obstacle() -> None:
    policy = make_policy("gru")
    env = wired(policy, 2)
    assert check_stepping(policy, env).detail.startswith("tensors (not cpp: function is not a plain module")
    policy.register_forward_hook(lambda *_: None)
    result = check_stepping(policy, env)
    assert result.passed
    assert result.detail.startswith("TensorDicts (not cpp or tensors: TensorDictSequential has hooks")
