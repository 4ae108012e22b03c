"""Test problems of matrix recurrences for the Triton kernels, with a slow reference, token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recurl.core.relative_error import relative_error
from recurl.recurrence import Boundaries
from recurl.recurrence.cuda.matrix.backend import TritonMatrix
from recurl.recurrence.matrix.kernels import MatrixInputs

GRADIENTS = ("query", "key", "value", "log_decay", "rate", "states")
NAMES = ("output", "after", *(f"gradient of {name}" for name in GRADIENTS))


@dataclass(frozen=True)
class Problem:
    """Inputs of a matrix recurrence and gradients of its results; without ``grad_after`` it has no states after."""

    inputs: MatrixInputs
    grad: Tensor
    grad_after: Tensor | None

    def to(self, dtype: torch.dtype) -> Problem:
        """Convert query, key, value and their gradient to ``dtype``, all others to float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        inputs = self.inputs
        narrow = {name: getattr(inputs, name).to(dtype) for name in ("query", "key", "value")}
        others = {name: getattr(inputs, name).to(wide) for name in ("log_decay", "rate")}
        states = None if inputs.states is None else inputs.states.to(wide)
        after = None if self.grad_after is None else self.grad_after.to(wide)
        return Problem(inputs._replace(**narrow, **others, states=states), self.grad.to(dtype), after)

    def poisoned(self, name: str, token: int, poison: float = float("nan")) -> Problem:
        """Return the problem with a number of one token replaced."""
        tensor = getattr(self, name) if name.startswith("grad") else getattr(self.inputs, name)
        bad = tensor.clone()
        bad[token].view(-1)[-1] = poison
        if name.startswith("grad"):
            return replace(self, **{name: bad})
        return replace(self, inputs=self.inputs._replace(**{name: bad}))


def problem(
    shape: tuple[int, ...] = (2, 21),
    heads: int = 1,
    sizes: tuple[int, int] = (4, 3),
    delta: bool = True,
    resets: float = 0.1,
    stored: bool = True,
    after: bool = True,
    decay: float = 0.3,
    seed: int = 0,
    starts: tuple[int, ...] = (),
) -> Problem:
    """A random problem in float64: keys of norm one, rates in [0, 1], stored states that are NaN unless read."""
    generator = torch.Generator().manual_seed(seed)
    is_init = torch.rand(shape, generator=generator) < resets
    is_init.view(-1)[list(starts)] = True
    boundaries = Boundaries.from_is_init(is_init, batch_shape=shape)
    tokens, (keys, values) = boundaries.num_tokens, sizes

    def random(*size: int) -> Tensor:
        return torch.randn(tokens, heads, *size, dtype=torch.float64, generator=generator)

    query, key, value = random(keys) / keys**0.5, torch.nn.functional.normalize(random(keys), dim=-1), random(values)
    rates = torch.rand(2, tokens, heads, dtype=torch.float64, generator=generator)
    read = boundaries.starts[:, None, None, None]
    states = torch.where(read, random(keys, values), torch.nan) if stored else None
    inputs = MatrixInputs(query, key, value, -decay * rates[0], rates[1], states, boundaries, delta, after)
    grad_after = torch.where(boundaries.ends[:, None, None, None], random(keys, values), torch.nan) if after else None
    return Problem(inputs, random(values), grad_after)


def outputs(inputs: MatrixInputs) -> tuple[Tensor, Tensor]:
    """Return the outputs and the states after every token."""
    query, key, value, log_decay, rate, states, boundaries, delta, _ = inputs
    state = value.new_zeros(())
    spacing = 1 if states is None else key.shape[0] // states.shape[0]
    results, after = [], []
    for n, start in enumerate(boundaries.starts.tolist()):
        if start:
            state = value.new_zeros(*key.shape[1:], value.shape[-1])
            if states is not None and n % spacing == 0:
                state = states[n // spacing]
        k, v = key[n].unsqueeze(-1), value[n].unsqueeze(-2)
        b, decay = rate[n][:, None, None], log_decay[n].exp()[:, None, None]
        removed = b * k @ (k.mT @ state) if delta else 0
        state = decay * (state - removed) + b * k @ v
        results.append((state.mT @ query[n].unsqueeze(-1)).squeeze(-1))
        after.append(state)
    return torch.stack(results), torch.stack(after)


def exact(case: Problem) -> tuple[Tensor | None, ...]:
    """Return what :func:`solve` returns, in float64."""
    tensors = [None if one is None else one.detach().requires_grad_() for one in case.inputs[:6]]
    inputs = MatrixInputs(*tensors, *case.inputs[6:])
    output, after = outputs(inputs)
    ends = inputs.boundaries.ends
    loss = (output * case.grad).sum()
    if case.grad_after is not None:
        loss = loss + (after[ends] * case.grad_after[ends]).sum()
    wanted = [one for one in tensors if one is not None]
    found = iter(torch.autograd.grad(loss, wanted))
    gradients = [None if one is None else next(found) for one in tensors]
    kept = torch.where(ends[:, None, None, None], after, 0).detach() if case.grad_after is not None else None
    return output.detach(), kept, *gradients


def solve(case: Problem, kernels: TritonMatrix) -> tuple[Tensor | None, ...]:
    """Return the outputs, the states after segments, and the gradients in the order of the inputs."""
    after, saved = kernels.forward(case.inputs, True)
    grads = (case.grad,) if case.grad_after is None else (case.grad, case.grad_after)
    found = kernels.backward(case.inputs, after, saved, grads)
    of_states = found[5]
    if case.inputs.states is not None and of_states is not None:
        of_states = of_states[:: of_states.shape[0] // case.inputs.states.shape[0]]
    return after[0], after[1] if case.inputs.after else None, *found[:5], of_states


def errors(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> dict[str, float]:
    """Return the error of each result; infinite where either isn't finite."""
    result = {}
    for name, one, other in zip(NAMES, found, expected, strict=True):
        if one is None or other is None:
            assert one is other, name
            continue
        assert one.shape == other.shape, name
        result[name] = relative_error(one, other)
    return result
