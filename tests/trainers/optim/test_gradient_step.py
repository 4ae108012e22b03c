import copy
import pickle

import pytest
import torch
from torch import nn

from recurl.core.errors import ArgumentError
from recurl.execution.executor import FORMS
from recurl.recurrence.cpu import instruction_sets
from recurl.trainers.optim.gradient_step import GradientStep

STEP = "recurl.trainers.optim.gradient_step:GradientStep.reference_step"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
def test_equals_adam_behind_clipped_gradients(max_norm, monkeypatch):
    monkeypatch.delitem(FORMS, STEP)
    ours, theirs = net(), net()
    step = GradientStep(ours.parameters(), learning_rate=0.1, max_norm=max_norm, eps=1e-5)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.1, eps=1e-5, fused=True)
    for _ in range(5):
        x = torch.randn(7, 3, dtype=torch.float64)
        norm = step(ours(x).square().mean())
        adam.zero_grad()
        theirs(x).square().mean().backward()
        assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
        adam.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
    assert str(step.state_dict()) == str(adam.state_dict())


def test_gradients_do_not_add_up_and_unused_parameters_stay():
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    step = GradientStep([weight, other], learning_rate=0.1, max_norm=1.0)
    norms = [step((weight * 2).sum()) for _ in range(3)]
    assert torch.stack(norms).tolist() == pytest.approx([8**0.5] * 3)
    assert other.tolist() == [1.0, 1.0]
    for _ in range(2):
        step((weight + other).sum())
    before = other.clone()
    step((weight * 2).sum())
    assert torch.equal(other, before)
    assert [state["step"].item() for state in step.optimizer.state.values()] == [6.0, 2.0]


def test_parameters_of_several_dtypes():
    """No form supports them: the definition is used."""
    weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    step = GradientStep(weights, learning_rate=0.1, max_norm=1.0)
    assert not step.optimizer.param_groups[0]["fused"]
    for _ in range(2):
        step(sum(weight.sum() for weight in weights))
    assert [weight.tolist() for weight in weights] == [pytest.approx([0.8, 0.8])] * 2
    reason = "the parameters aren't of one floating-point dtype and on one device"
    assert step.explain() == {"cpp": reason, "triton": reason}


def test_a_saved_state_resumes_bit_for_bit():
    first = net()
    step = GradientStep(first.parameters(), learning_rate=0.1, max_norm=1.0)
    x = torch.randn(7, 3, dtype=torch.float64)
    step(first(x).square().mean())
    second = copy.deepcopy(first)
    other = GradientStep(second.parameters(), learning_rate=0.5, max_norm=1.0)
    other.load_state_dict(copy.deepcopy(step.state_dict()))
    for model, optimizer in ((first, step), (second, other)):
        optimizer.set_learning_rate(0.05)
        optimizer(model(x).square().mean())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_capturable_step_is_the_same_and_its_rate_stays_one_tensor():
    plain, captured = net(), net()
    first = GradientStep(plain.parameters(), learning_rate=0.1, max_norm=1.0)
    second = GradientStep(captured.parameters(), learning_rate=0.1, max_norm=1.0, capturable=True)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.optimizer.param_groups[0]["capturable"]
    rate = second.optimizer.param_groups[0]["lr"]
    x = torch.randn(7, 3, dtype=torch.float64)
    for learning_rate in (0.1, 0.05):
        first.set_learning_rate(learning_rate)
        second.set_learning_rate(learning_rate)
        first(plain(x).square().mean())
        second(captured(x).square().mean())
    assert second.optimizer.param_groups[0]["lr"] is rate
    for a, b in zip(plain.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # the rate is a float32 tensor


def state_of(step):
    return [p.detach().clone() for p in step._parameters] + [
        value.clone() for state in step.optimizer.state.values() for value in state.values()
    ]


@pytest.mark.parametrize(
    ("dtypes", "capturable", "forms"),
    [
        ((torch.float32,) * 2, False, FORMS[STEP]),
        ((torch.float32,) * 2, False, []),
        ((torch.float32,) * 2, True, []),
        ((torch.float32, torch.float64), False, []),
    ],
    ids=["form", "fused", "capturable", "unfused"],
)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    "loss",
    [
        lambda a, b: a.sum() + b.sum() * torch.nan,
        lambda a, b: (a.sum() + b.sum()) * torch.inf,
        lambda a, b: a.sum() + b.sum() + torch.inf,  # its gradient is finite
        lambda a, b: a.sum() * 3e38 + b.sum() * 3e38,  # the norm isn't
        lambda a, b: a.sqrt().sum() * 0 + (b - 1).sqrt().sum(),  # the gradient isn't
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(dtypes, capturable, forms, steps, loss, monkeypatch):
    monkeypatch.setitem(FORMS, STEP, forms)
    weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
    other = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
    ours, theirs = (GradientStep(w, learning_rate=0.1, max_norm=1.0, capturable=capturable) for w in (weights, other))
    good = lambda a, b: (a * 2).sum() + b.square().sum()  # noqa: E731 - a formula
    for _ in range(steps):
        ours(good(*weights))
        theirs(good(*other))
    before = state_of(ours)
    given = loss(*weights)
    norm = ours(given)
    assert not (norm + given.detach()).isfinite()
    if steps:
        assert all(map(torch.equal, state_of(ours), before))
    for _ in range(3):  # and the bad step leaves no trace
        assert torch.equal(ours(good(*weights)), theirs(good(*other)))
    assert all(map(torch.equal, state_of(ours), state_of(theirs)))


def test_a_state_of_other_parameters_is_refused():
    step = GradientStep([nn.Parameter(torch.ones(2))], learning_rate=0.1, max_norm=1.0)
    other = nn.Parameter(torch.ones(3))
    from_other = GradientStep([other], learning_rate=0.1, max_norm=1.0)
    from_other(other.sum())
    with pytest.raises(ArgumentError, match=r"must have the shapes of the parameters, got \{torch.Size\(\[3\]\)\} for"):
        step.load_state_dict(from_other.state_dict())


def test_gradients_that_a_program_has_computed_are_taken_as_they_are():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    options = {"learning_rate": 0.1, "max_norm": 1.0}
    ours, theirs = GradientStep(weights[:1], **options), GradientStep(weights[1:], **options)
    for _ in range(3):
        loss = weights[0].square().sum()
        (weights[0].grad,) = torch.autograd.grad(loss, [weights[0]])
        assert torch.equal(ours.descend(loss.detach()), theirs(weights[1].square().sum()))
    assert torch.equal(*weights)


def test_a_loss_without_a_gradient_moves_nothing() -> None:
    """The parameters already hold the gradient of another loss."""
    weight = nn.Parameter(torch.ones(2))
    step = GradientStep([weight], learning_rate=0.1, max_norm=1.0)
    step(weight.sum())
    before = weight.detach().clone()
    with pytest.raises(RuntimeError, match="does not require grad"):
        step(torch.tensor(1.0))
    assert torch.equal(weight, before)


def test_a_state_is_restored_twice():
    """Later steps don't modify the loaded state."""
    weight = nn.Parameter(torch.zeros(2))
    step = GradientStep([weight], learning_rate=0.1, max_norm=1.0)
    for scale in (1.0, 2.0):
        step((weight * torch.tensor([3.0, 4.0])).sum() * scale)
    begun, saved = weight.detach().clone(), copy.deepcopy(step.state_dict())
    ends = []
    for _ in range(2):
        with torch.no_grad():
            weight.copy_(begun)
        step.load_state_dict(saved)
        for scale in (-1.0, 0.5, 3.0):
            step((weight * torch.tensor([0.3, -0.4])).sum() * scale)
        ends.append(weight.detach().clone())
    assert torch.equal(*ends)


class Halving(torch.optim.Adam):
    """Halves the parameters after every step."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)


def change_options(**options):
    return lambda step: step.optimizer.param_groups[0].update(options)


def change_state(step):
    for state in step.optimizer.state.values():
        state["exp_avg"] = torch.ones_like(state["exp_avg"])


def forget_state(step):
    step.optimizer.state.clear()


def load_decay(step):
    state = step.state_dict()
    state["param_groups"][0]["weight_decay"] = 0.5
    step.load_state_dict(state)


def split_groups(step):
    group = step.optimizer.param_groups[0]
    last = group["params"].pop()
    step.optimizer.add_param_group({**group, "params": [last], "lr": 0.001})


def halve_after_steps(step):
    def halve(optimizer, args, kwargs):
        with torch.no_grad():
            for parameter in step._parameters:
                parameter.mul_(0.5)

    step.optimizer.register_step_post_hook(halve)


def use(kind, **options):
    def change(step):
        step.optimizer = kind(step._parameters, lr=0.1, fused=True, **options)

    return change


def step_twice(step):
    once = step.optimizer.step
    step.optimizer.step = lambda: (once(), once())


@pytest.mark.skipif(not instruction_sets(), reason="there was no compiler when recurl was installed")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_options(lr=0.01, betas=(0.5, 0.9), eps=1e-3), None),
        (change_options(weight_decay=0.5), "the optimizer uses weight_decay"),
        (change_options(maximize=True), "the optimizer uses maximize"),
        (load_decay, "the optimizer uses weight_decay"),
        (change_state, None),
        (forget_state, None),
        (split_groups, "the optimizer's parameters aren't those of the step, in one group"),
        (halve_after_steps, "the optimizer has hooks"),
        (use(torch.optim.SGD), "the optimizer is SGD, whose step is not that of torch.optim.Adam"),
        (use(torch.optim.AdamW, weight_decay=0.0), None),
        (use(torch.optim.AdamW, weight_decay=0.5), "the optimizer uses weight_decay"),
        (use(Halving), "the optimizer is Halving, whose step is not that of torch.optim.Adam"),
        (step_twice, "the optimizer is Adam, whose step is not that of torch.optim.Adam"),
    ],
)
def test_edits_of_the_optimizer_between_steps(change, reason, monkeypatch):
    """They take effect as in the definition."""
    models, explained = [net(), net()], None
    for model, forms in zip(models, (FORMS[STEP][:1], []), strict=True):
        monkeypatch.setitem(FORMS, STEP, forms)
        step = GradientStep(model.parameters(), learning_rate=0.1, max_norm=0.5)
        generator = torch.Generator().manual_seed(1)
        for number in range(6):
            if number == 3:
                change(step)
            step(model(torch.randn(7, 3, generator=generator, dtype=torch.float64)).square().mean())
        explained = explained or step.explain()
    assert explained == {"cpp": reason}
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_has_its_own_state(copied):
    model = net()
    step = GradientStep(model.parameters(), learning_rate=0.1, max_norm=1.0)
    x = torch.randn(7, 3, dtype=torch.float64)
    step(model(x).square().mean())
    other, other_step = copied((model, step))
    for _ in range(2):
        step(model(x).square().mean())
    for _ in range(2):
        other_step(other(x).square().mean())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
