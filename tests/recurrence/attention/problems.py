"""Test problems of windowed attention, with a slow reference in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from recurl.core.relative_error import relative_error
from recurl.recurrence import Boundaries, record_backends
from recurl.recurrence.attention import windowed_attention

NAMES = ("query", "key", "value", "position", "windows", "to_key", "to_value")


@dataclass(frozen=True)
class Problem:
    """Inputs of windowed attention and a gradient of its result."""

    query: Tensor
    key: Tensor
    value: Tensor
    position: Tensor
    windows: Tensor | None
    to_key: Tensor | None
    to_value: Tensor | None
    boundaries: Boundaries
    grad: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: one for name in NAMES if (one := getattr(self, name)) is not None}

    def to(self, dtype: torch.dtype) -> Problem:
        return replace(self, **{name: one.to(dtype) for name, one in self.tensors.items()}, grad=self.grad.to(dtype))

    def solve(self, backend: str) -> dict[str, Tensor]:
        """Return the result and all gradients; checks that the requested backend has run."""
        leaves = {name: one.detach().requires_grad_() for name, one in self.tensors.items()}
        with record_backends() as ran:
            result = windowed_attention(**leaves, boundaries=self.boundaries, recurrent_backend=backend)
        assert ran == [backend] * min(1, result.numel())
        found = torch.autograd.grad(result, [*leaves.values()], self.grad, allow_unused=True)
        zipped = zip(leaves.items(), found, strict=True)
        return {"result": result.detach()} | {k: torch.zeros_like(x) if g is None else g for (k, x), g in zipped}


def problem(
    shape: tuple[int, ...] = (3, 7),
    heads: int = 2,
    size: int = 3,
    past: int = 4,
    width: int = 5,
    dtype: torch.dtype = torch.float64,
    rate: float = 0.2,
    seed: int = 0,
) -> Problem:
    """A random problem; segments start at row starts and elsewhere at ``rate``. Without windows for a width of 0."""
    generator = torch.Generator().manual_seed(seed)
    boundaries = Boundaries.from_is_init(torch.rand(shape, generator=generator) < rate, batch_shape=shape)
    tokens = boundaries.num_tokens

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    query, key, value, grad = (normal(tokens, heads, size) for _ in range(4))
    windows = to_key = to_value = None
    if width:
        windows, to_key, to_value = normal(tokens, past, width), normal(heads, size, width), normal(heads, size, width)
        windows[..., -1] = torch.rand(tokens, past, generator=generator) < 0.6
        to_key = to_key / width**0.5
    position = normal(tokens, heads, past + 1)
    return Problem(query, key, value, position, windows, to_key, to_value, boundaries, grad).to(dtype)


def exact(problem: Problem) -> dict[str, Tensor]:
    """Return the result and all gradients, computed token by token in float64."""
    given = {name: one.detach().double().numpy() for name, one in problem.tensors.items()}
    grad, starts = problem.grad.double().numpy(), problem.boundaries.starts.tolist()
    query, key, value, position = (given[name] for name in NAMES[:4])
    found = {name: np.zeros_like(one) for name, one in given.items()}
    result, past, start = np.zeros_like(query), position.shape[-1] - 1, 0
    spacing = query.shape[0] // given["windows"].shape[0] if "windows" in given else 1
    for n, begins in enumerate(starts):
        start = n if begins else start
        for h in range(query.shape[1]):
            keys, values, places = [], [], []
            for distance in range(past + 1):
                token, place = n - distance, n - distance - start + past
                if token >= start:
                    keys, values = [*keys, key[token, h]], [*values, value[token, h]]
                    places.append((distance, token, None))
                elif "windows" in given and start % spacing == 0 and given["windows"][start // spacing, place, -1] > 0:
                    x = given["windows"][start // spacing, place]
                    keys, values = [*keys, given["to_key"][h] @ x], [*values, given["to_value"][h] @ x]
                    places.append((distance, start // spacing, place))
            scores = np.array([k @ query[n, h] + position[n, h, d] for k, (d, *_) in zip(keys, places, strict=True)])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            result[n, h] = weights @ np.array(values)
            towards = np.array([v @ grad[n, h] for v in values])
            to_scores = weights * (towards - weights @ towards)
            for w, ds, k, (distance, token, place) in zip(weights, to_scores, keys, places, strict=True):
                found["query"][n, h] += ds * k
                found["position"][n, h, distance] += ds
                if place is None:
                    found["key"][token, h] += ds * query[n, h]
                    found["value"][token, h] += w * grad[n, h]
                else:
                    x, k_map, v_map = given["windows"][token, place], given["to_key"][h], given["to_value"][h]
                    found["windows"][token, place] += ds * query[n, h] @ k_map + w * grad[n, h] @ v_map
                    found["to_key"][h] += ds * np.outer(query[n, h], x)
                    found["to_value"][h] += w * np.outer(grad[n, h], x)
    return {"result": torch.from_numpy(result)} | {name: torch.from_numpy(one) for name, one in found.items()}


def worst_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(relative_error(one, expected[name]) for name, one in found.items())


def reached(problem: Problem, sick: Tensor) -> dict[str, Tensor]:
    """Return which tokens' result and gradients depend on queries or gradients of ``sick`` tokens, or on their keys.

    ``sick`` is bool ``[N]`` of the tokens; the result is bool ``[N]`` by name: "result" of those that attend to a sick
    token, "attended" of those that tokens with such a result attend to, "seen" of those that sick tokens attend to.
    """
    start, past = problem.boundaries.start_index, problem.position.shape[-1] - 1
    token = torch.arange(sick.shape[0])
    attends = (start[:, None] <= token) & (token <= token[:, None]) & (token[:, None] - token <= past)
    result = (attends & sick).any(1)
    return {
        "result": result,
        "attended": (attends & result[:, None]).any(0),
        "seen": (attends & sick[:, None]).any(0),
    }
