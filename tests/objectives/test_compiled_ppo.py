"""PPO losses and gradients in one call of the C++ library: equal to the loss, or a reason why it is not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recurl import execution
from recurl.core.errors import ArgumentError, MissingKeyError, UsageError
from recurl.execution import NotCompiled
from recurl.modules import OneHotCategorical
from recurl.objectives import A2CLoss, ClipPPOLoss
from recurl.objectives.compiled_ppo import CompiledPPO
from recurl.objectives.policy import ActorCritic
from recurl.recurrence.cpu import instruction_sets

from .test_compiled_policy import KINDS, make

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")

OPTIONS: list[dict[str, Any]] = [
    {},
    {"normalize_advantage": True, "entropy_coeff": 0.0},
    {"loss_critic_type": "l1", "critic_coeff": 0.3, "entropy_bonus": False},
    {
        "loss_critic_type": "l2",
        "clip_value": 0.1,
        "clip_epsilon": torch.tensor(0.01),
        "entropy_coeff": torch.tensor(0.1),
    },
    {"clip_value": True, "normalize_advantage": True},
]


def gradients(loss: ClipPPOLoss) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in loss.parameters()]
    for parameter in loss.parameters():
        parameter.grad = None
    return found


def fused(loss: ClipPPOLoss) -> Any:
    """Return the gradients of a loss, which raise unless they run as one call."""
    return CompiledPPO(loss.gradients)


def expected(loss: ClipPPOLoss, batch: Any) -> tuple[dict[Any, Tensor], list[Tensor | None]]:
    found = loss.tensors(batch)
    torch.stack([value for key, value in found.items() if key.startswith("loss_")]).sum().backward()
    return {key: value.detach() for key, value in found.items()}, gradients(loss)


def check(loss: ClipPPOLoss, batch: Any) -> None:
    losses, grads = expected(loss, batch)
    found = fused(loss)(batch)
    assert list(found) == list(losses)
    for key, value in losses.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-6, equal_nan=True)
    for grad, other in zip(gradients(loss), grads, strict=True):
        assert (grad is None) == (other is None)
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def in_float64(batch: Any) -> Any:
    return batch.apply(lambda value: value.double() if value.is_floating_point() else value)


@pytest.mark.parametrize("metrics", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_metrics_and_gradients_are_the_same(kind: str, options: dict[str, Any], metrics: bool) -> None:
    actor, critic, batch = make(kind)
    batch["state_value"] = torch.randn(2, 20, 1)
    loss = ClipPPOLoss(actor, critic, **options)
    loss.metrics = metrics
    check(loss, batch)
    loss.double()
    check(loss, in_float64(batch))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clip_that_holds_every_value_changes_no_bit(dtype: torch.dtype, compiled: bool) -> None:
    """``value - old == clip`` for all tokens, but ``old + clip`` is rounded below the value."""
    old = -torch.rand(1000, dtype=dtype)
    value = 0.3 * torch.rand(1000, dtype=dtype)
    clip = value - old
    lost = (old + clip < value).nonzero()[0].item()
    actor, critic, batch = make("choice")
    batch = batch if dtype == torch.float32 else in_float64(batch)
    batch["state_value"] = old[lost].expand(2, 20, 1).clone()
    batch["value_target"] = 2 * value[lost].expand(2, 20, 1).clone()
    results = list[list[Tensor | None]]()
    for clip_value in (False, clip[lost].item()):
        loss = ClipPPOLoss(actor, critic, clip_value=clip_value).to(dtype)
        with torch.no_grad():
            critic[1].module.weight.zero_()
            critic[1].module.bias.fill_(value[lost])
        if compiled:
            losses = fused(loss)(batch)
            found = gradients(loss)
        else:
            losses, found = expected(loss, batch)
        results.append([losses["loss_critic"], *found])
    for one, other in zip(*results, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_rows_without_a_choice_and_certain_choices() -> None:
    actor, critic, batch = make("masked")
    batch["mask"][0, 3] = False
    check(ClipPPOLoss(actor, critic, entropy_coeff=0.1), batch)
    actor, critic, batch = make("choice")
    with torch.no_grad():
        actor.module[0].module[1].module.weight.mul_(1e4)
    batch["action_log_prob"].fill_(0.0)
    check(ClipPPOLoss(actor, critic, entropy_coeff=0.1).double(), in_float64(batch))


def test_actions_on_the_bounds() -> None:
    actor, critic, batch = make("box")
    batch["action"][0, :3] = 1.0
    batch["action"][1, :3] = -1.0
    batch["action_log_prob"][:, :3] = -3.0
    check(ClipPPOLoss(actor, critic, entropy_coeff=0.1), batch)


def test_nan_spoils_the_losses() -> None:
    actor, critic, batch = make("choice")
    loss = ClipPPOLoss(actor, critic)
    for key in ("advantage", "value_target", "action_log_prob"):
        spoiled = batch.clone()
        spoiled[key].view(-1)[5] = torch.nan
        found: Any = fused(loss)(spoiled)
        assert found["loss_critic" if key == "value_target" else "loss_objective"].isnan()


def test_equal_targets_explain_nothing() -> None:
    actor, critic, batch = make("choice")
    batch["value_target"].fill_(2.0)
    check(ClipPPOLoss(actor, critic), batch)


def test_results_of_a_call_outlive_the_next() -> None:
    actor, critic, batch = make("choice")
    loss = ClipPPOLoss(actor, critic)
    run = fused(loss)
    first: Any = run(batch)
    kept = {key: value.clone() for key, value in first.items()}
    batch["advantage"].mul_(3)
    run(batch)
    assert all(torch.equal(first[key], kept[key]) for key in kept)


class _Own(ClipPPOLoss):
    """A subclass that computes what its base class computes."""


class _Doubled(ClipPPOLoss):
    def losses_of(self, batch: Any, plan: Any, keys: Any) -> dict[Any, Tensor]:
        return {name: 2 * value for name, value in super().losses_of(batch, plan, keys).items()}


def test_subclasses_run_in_the_fastest_form_of_what_they_keep() -> None:
    actor, critic, batch = make("choice")
    for cls, form in ((ClipPPOLoss, "fused"), (_Own, "fused"), (_Doubled, "cpp"), (A2CLoss, "cpp")):
        loss: Any = cls(actor, critic)
        run: Any = execution.compile(loss.gradients)
        found = run(batch)
        assert run.explain().form == form, run.explain()
        grads = gradients(loss)
        losses, others = expected(loss, batch)
        torch.testing.assert_close(found["loss_objective"], losses["loss_objective"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(grads, others, rtol=1e-4, atol=1e-6)
    assert execution.compile(_Doubled(actor, critic).gradients).explain()["fused"] == "_Doubled overrides losses_of"


class _Huber(ClipPPOLoss):
    @property
    def distance(self) -> str:
        return "huber"


def test_a_distance_that_does_not_exist_is_named() -> None:
    actor, critic, batch = make("choice")
    loss = _Huber(actor, critic)
    for run in (loss.gradients, execution.compile(loss.gradients)):
        with pytest.raises(ArgumentError, match=r"distance of a loss must be one of \['l1', 'l2', .*\], got 'huber'"):
            run(batch)


def test_other_batches_say_why_not() -> None:
    actor, critic, batch = make("choice")
    run: Any = execution.compile(ClipPPOLoss(actor, critic).gradients)
    padded = batch.clone().set(("collector", "mask"), torch.ones(2, 20, dtype=torch.bool))
    for other, reason in (
        (batch.clone().set("advantage", torch.randn(2, 20, 1).double()), "aren't plain numbers"),
        (padded, "padding"),
    ):
        run(other)
        assert reason in run.explain()["fused"]
    once = fused(ClipPPOLoss(actor, critic))
    for other, reason in (
        (batch.clone().set("action", torch.zeros(2, 20)), "the actions are"),
        (batch.clone().set("action", torch.full((2, 20), 3)), "out of range"),
    ):
        with pytest.raises(NotCompiled, match=reason):
            once(other)
    with torch.no_grad(), pytest.raises(NotCompiled, match="gradients are disabled"):
        once(batch)
    run(batch)
    assert str(run.explain()) == "gradients: fused"
    run = execution.compile(ClipPPOLoss(actor, critic).make_value_estimator("gae").gradients)
    run(batch)
    assert run.explain()["fused"] == "the loss runs an estimator"


@pytest.mark.parametrize("method", ["tensors", "losses", "losses_of", "read", "_evaluate", "_ratio_metrics"])
def test_methods_of_an_instance_are_called(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, critic, _ = make("choice")
    loss = ClipPPOLoss(actor, critic)
    monkeypatch.setattr(loss, method, getattr(loss, method))
    assert execution.compile(loss.gradients).explain()["fused"] == f"ClipPPOLoss overrides {method}"


def test_errors_are_those_of_the_loss() -> None:
    actor, critic, batch = make("choice")
    run = execution.compile(ClipPPOLoss(actor, critic).gradients)
    with pytest.raises(MissingKeyError, match="advantage"):
        run(batch.exclude("advantage"))
    with pytest.raises(UsageError, match="must not require gradients"):
        run(batch.clone().set("action_log_prob", torch.zeros(2, 20, requires_grad=True)))


def test_parameters_without_gradients_keep_none() -> None:
    """Frozen parameters, and those that the losses don't depend on."""
    actor, critic, batch = make("choice")
    loss: Any = ClipPPOLoss(actor, critic)
    loss.unused = torch.nn.Parameter(torch.ones(2))
    frozen, *_ = actor.parameters()
    frozen.requires_grad_(False)
    for parameter in loss.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    fused(loss)(batch)
    assert frozen.grad is loss.unused.grad is None
    assert sum(grad is None for grad in gradients(loss)) == 2


def test_parameters_that_are_frozen_or_unfrozen_between_calls() -> None:
    actor, critic, batch = make("choice")
    loss = ClipPPOLoss(actor, critic)
    run: Any = execution.compile(loss.gradients)
    run(batch)
    first, *_ = actor.parameters()
    for trained in (False, True):
        first.requires_grad_(trained)
        run(batch)
        assert (first.grad is not None) is trained
        assert ("frozen" in str(run.explain())) is not trained


def test_coefficients_with_gradients() -> None:
    actor, critic, batch = make("choice")
    loss = ClipPPOLoss(actor, critic, entropy_coeff=torch.nn.Parameter(torch.tensor(0.1)))
    run: Any = execution.compile(loss.gradients)
    found = run(batch)
    assert run.explain()["fused"] == "a coefficient of the loss requires gradients"
    assert not found["loss_entropy"].requires_grad
    torch.testing.assert_close(loss.entropy_coeff.grad, -found["entropy"])


def test_one_hot_actions_of_bool() -> None:
    actor, critic, batch = make("choice")
    actor[-1].distribution_class = OneHotCategorical
    action = torch.nn.functional.one_hot(batch["action"], 3)
    losses, grads = expected(ClipPPOLoss(actor, critic), batch.set("action", action))
    found = fused(loss := ClipPPOLoss(actor, critic))(batch.set("action", action.bool()))
    torch.testing.assert_close(found["loss_objective"], losses["loss_objective"])
    torch.testing.assert_close(gradients(loss), grads, rtol=1e-4, atol=1e-6)


class _Twice(ActorCritic):
    def __call__(self, batch: Any, value_key: Any) -> Any:
        dist, value = super().__call__(batch, value_key)
        return dist, 2 * value


class _Planned(ClipPPOLoss):
    def plan(self) -> ActorCritic:
        return _Twice(*super().plan())


def test_networks_that_run_in_their_own_way() -> None:
    actor, critic, batch = make("choice")
    loss = _Planned(actor, critic)
    run: Any = execution.compile(loss.gradients)
    found = run(batch)
    reason = "_Twice overrides how the networks run"
    assert run.explain() == {"fused": reason, "cpp": reason}
    assert loss.explain(batch)["cpp"] == reason
    assert torch.equal(found["loss_critic"], loss.tensors(batch)["loss_critic"])


class _OtherKeys(ClipPPOLoss):
    def keys_of(self, plan: ActorCritic) -> Any:
        return replace(super().keys_of(plan), advantage="gain")


class _Squares(ClipPPOLoss):
    @property
    def distance(self) -> str:
        return "l2"


class _Scaled(ClipPPOLoss):
    def _estimated(self, batch: Any, keys: Any) -> Any:
        return batch.copy().set("advantage", 3 * batch["advantage"])


@pytest.mark.parametrize(("cls", "form"), [(_OtherKeys, "fused"), (_Squares, "fused"), (_Scaled, "cpp")])
def test_overridden_parts_count(cls: type[ClipPPOLoss], form: str) -> None:
    actor, critic, batch = make("choice")
    batch.set("gain", 2 * batch["advantage"])
    plain, loss = ClipPPOLoss(actor, critic).tensors(batch), cls(actor, critic)
    losses, grads = expected(loss, batch)
    assert any(not torch.allclose(losses[key], plain[key]) for key in losses)
    run: Any = execution.compile(loss.gradients)
    torch.testing.assert_close(run(batch), losses, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(gradients(loss), grads, rtol=1e-4, atol=1e-6)
    assert run.explain().form == form
