"""Actor-critic losses through the C++ library: equal losses and gradients, or a reason why it is not used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import nn

from recurl import execution
from recurl.execution import NotCompiled
from recurl.modules import (
    Categorical,
    LSTMModule,
    MaskedCategorical,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
)
from recurl.objectives import A2CLoss, ClipPPOLoss
from recurl.objectives.compiled_policy import CompiledActorCritic
from recurl.recurrence.cpu import instruction_sets

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")

HIDDEN = 7
KINDS: dict[str, Any] = {
    "choice": (nn.Linear(HIDDEN, 3), ["logits"], Categorical, lambda: torch.randint(3, (2, 20))),
    "masked": (nn.Linear(HIDDEN, 3), ["logits"], MaskedCategorical, lambda: torch.ones(2, 20, dtype=torch.int64)),
    "box": (
        nn.Sequential(nn.Linear(HIDDEN, 4), NormalParamExtractor()),
        ["loc", "scale"],
        TanhNormal,
        lambda: torch.rand(2, 20, 2) - 0.5,
    ),
}


def make(kind: str, backend: str = "fastest", head: nn.Module | None = None) -> tuple[Any, Any, TensorDict]:
    torch.manual_seed(0)
    layer, keys, distribution, draw = KINDS[kind]
    layer = copy.deepcopy(layer)
    for part in layer.modules():
        if isinstance(part, nn.Linear):  # drawn with the seed
            part.reset_parameters()
    memory = LSTMModule(4, HIDDEN, in_key="observation", out_key="features", recurrent_backend=backend)
    reads: Any = {"logits": "logits", "mask": "mask"} if kind == "masked" else keys
    actor = ProbabilisticActor(
        Seq(memory, Mod(head or layer, ["features"], keys)),
        reads,
        distribution_class=distribution,
        return_log_prob=True,
    )
    critic = Seq(memory, Mod(nn.Linear(HIDDEN, 1), ["features"], ["state_value"]))
    batch = TensorDict({"observation": torch.randn(2, 20, 4), "is_init": torch.rand(2, 20, 1) < 0.1}, [2, 20])
    batch["mask"] = torch.rand(2, 20, 3) < 0.5
    batch["mask"][..., 1] = True
    batch["action"], batch["action_log_prob"] = draw(), torch.randn(2, 20) * 0.1 - 1
    batch["advantage"], batch["value_target"] = torch.randn(2, 20, 1), torch.randn(2, 20, 1)
    return actor, critic, batch


def compiled(loss: Any) -> dict[str, CompiledActorCritic]:
    return {"plan": CompiledActorCritic(*loss.plan())}


def run(loss: Any, batch: TensorDict, **networks: Any) -> tuple[dict[Any, torch.Tensor], list[torch.Tensor]]:
    found = loss.tensors(batch, **networks)
    torch.stack([value for key, value in found.items() if key.startswith("loss_")]).sum().backward()
    grads = [parameter.grad for parameter in loss.parameters()]
    for parameter in loss.parameters():
        parameter.grad = None
    return found, grads


@pytest.mark.parametrize("cls", [ClipPPOLoss, A2CLoss])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_the_same(kind: str, cls: Any) -> None:
    actor, critic, batch = make(kind)
    loss = cls(actor, critic, entropy_coeff=0.1)
    assert loss.explain(batch)["cpp"] is None
    expected, grads = run(loss, batch)
    networks = compiled(loss)
    found, others = run(loss, batch, **networks)
    again, _ = run(loss, batch, **networks)
    assert all(torch.equal(found[key], again[key]) for key in found)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
    for grad, other in zip(others, grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-6)


def test_the_library_runs_once() -> None:
    actor, critic, batch = make("choice")
    loss = ClipPPOLoss(actor, critic)
    found = loss.tensors(batch, **compiled(loss))
    nodes: set[Any] = set()
    seen: list[Any] = [found["loss_objective"].grad_fn]
    while seen:
        node = seen.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            seen += [parent for parent, _ in node.next_functions]
    names = [type(node).__name__ for node in nodes]
    assert names.count("_PassBackward") == 1
    assert "_RecurrenceBackward" not in names


class _Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as in torch
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head": _Own(HIDDEN, 3)}, "_Own has no C++ implementation"),
        ({"backend": "loop"}, "uses another backend"),
    ],
)
def test_unsupported_networks_run_as_before(options: Any, reason: str) -> None:
    actor, critic, batch = make("choice", **options)
    loss = ClipPPOLoss(actor, critic)
    assert reason in str(loss.explain(batch)["cpp"])
    expected, grads = run(loss, batch)
    gradients = execution.compile(loss.gradients)
    found = gradients(batch)
    assert reason in gradients.explain()["cpp"]
    others = [parameter.grad for parameter in loss.parameters()]
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert all(torch.equal(grad, other) for grad, other in zip(others, grads, strict=True))


def test_heads_that_write_the_same_entry_run_as_before() -> None:
    actor, critic, batch = make("choice")
    both = Seq(*critic.module[:1], Mod(nn.Linear(HIDDEN, 3), ["features"], ["logits"]), critic.module[1])
    loss = ClipPPOLoss(actor, both)
    assert "the same entry" in str(loss.explain(batch)["cpp"])


def test_batches_unlike_the_first_run_as_before() -> None:
    actor, critic, batch = make("choice")
    loss = ClipPPOLoss(actor, critic)
    other = batch.clone()
    other["recurrent_state_h"] = other["recurrent_state_c"] = torch.randn(2, 20, 1, HIDDEN)
    expected = loss.tensors(batch)
    gradients = execution.compile(loss.gradients)
    gradients(other)
    assert gradients.explain().form == "fused"
    found = gradients(batch)
    assert (
        gradients.explain()["fused"]
        == "the batch is unlike the first, or a parameter has hooks or was frozen or unfrozen"
    )
    gradients(other)
    assert gradients.explain().form == "fused"
    networks = compiled(loss)
    loss.tensors(other, **networks)
    with pytest.raises(NotCompiled, match="unlike the first"):
        loss.tensors(batch, **networks)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-4, atol=1e-5)


def test_nothing_is_kept_between_forms() -> None:
    actor, critic, batch = make("choice")
    loss = ClipPPOLoss(actor, critic)
    loss.tensors(batch, **compiled(loss))
    with torch.no_grad():
        critic.module[1].module = nn.Linear(HIDDEN, 1)
    found = loss.tensors(batch, **compiled(loss))
    torch.testing.assert_close(found["loss_critic"], loss.tensors(batch)["loss_critic"])
