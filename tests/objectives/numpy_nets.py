"""NumPy networks for reference losses, analytic in their weights, so that a complex step differentiates them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from recurl.core.keys import TRAJ_IDS

Array = NDArray[np.complex128] | NDArray[np.float64]
Weights = dict[str, Array]
_STEP = 1e-150


def weights_of(module: torch.nn.Module) -> Weights:
    return {name: value.detach().numpy().astype(np.float64) for name, value in module.named_parameters()}


def minimum(a: Array, b: Array) -> Array:
    return np.where(a.real <= b.real, a, b)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def mlp(weights: Weights, x: Array) -> Array:
    """Linear layers with tanh in between, like recurl's ``MLP``: ``[..., n] -> [..., m]``."""
    layers = sorted({int(name.split(".")[0]) for name in weights})
    for layer in layers:
        x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = np.tanh(x) if layer != layers[-1] else x
    return x


def recurrent_step(cell: str, weights: Weights, x: Array, states: list[Array]) -> tuple[Array, list[Array]]:
    """One step of a stacked LSTM or GRU by torch's formulas: features, and the next states ``[layers, H]``."""
    after: list[list[Array]] = []
    for layer in range(len(states[0])):
        w = {kind: weights[f"{kind}_l{layer}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
        inner, outer = w["weight_ih"] @ x + w["bias_ih"], w["weight_hh"] @ states[0][layer] + w["bias_hh"]
        if cell == "lstm":
            i, f, g, o = np.split(inner + outer, 4)
            c = sigmoid(f) * states[1][layer] + sigmoid(i) * np.tanh(g)
            new = [sigmoid(o) * np.tanh(c), c]
        else:
            (ri, zi, ni), (ro, zo, no) = np.split(inner, 3), np.split(outer, 3)
            z = sigmoid(zi + zo)
            new = [(1 - z) * np.tanh(ni + sigmoid(ri + ro) * no) + z * states[0][layer]]
        after.append(new)
        x = new[0]
    return x, [np.stack(values) for values in zip(*after, strict=True)]


def segments_of(batch: TensorDict) -> list[NDArray[np.int64]]:
    """Return flat indices of the sequences of ``[B, T]``, split at row starts, ``is_init`` and new trajectory ids."""
    ids, init = batch[TRAJ_IDS].numpy(), batch["is_init"].squeeze(-1).numpy()
    rows, steps = ids.shape
    starts = [
        row * steps + t
        for row in range(rows)
        for t in range(steps)
        if t == 0 or init[row, t] or ids[row, t] != ids[row, t - 1]
    ]
    return np.split(np.arange(rows * steps), starts[1:])


def unrolled(
    cell: str, trunk: Weights, batch: TensorDict, states: list[str], segments: list[NDArray[np.int64]]
) -> tuple[Array, Array]:
    """Return features of every observation and of every next observation of a batch, ``[N, H]`` each.

    Each sequence starts from the stored state of its first token; the feature after its last token comes from one
    more step, with the true next observation.
    """
    flat = batch.reshape(-1)
    observed, after = flat["observation"].numpy(), flat["next", "observation"].numpy()
    if cell == "none":
        return mlp(trunk, observed), mlp(trunk, after)
    now, following = [None] * len(observed), [None] * len(observed)
    for segment in segments:
        held = [flat[key][segment[0]].numpy() for key in states]
        for token in segment:
            now[token], held = recurrent_step(cell, trunk, observed[token], held)
            following[token], _ = recurrent_step(cell, trunk, after[token], held)
    return np.stack(now), np.stack(following)


def n_step(gamma: float, steps: int, next_value: Array, batch: TensorDict, segments: list[NDArray[np.int64]]) -> Array:
    """Return sums of up to ``steps`` rewards and the value after them, never past the end of a sequence, ``[N]``."""
    flat = batch.reshape(-1)
    reward = flat["next", "reward"].squeeze(-1).numpy().astype(np.float64)
    terminated = flat["next", "terminated"].squeeze(-1).numpy()
    total = np.zeros(len(reward))
    for segment in segments:
        for position, token in enumerate(segment):
            for later, t in enumerate(segment[position : position + steps]):
                total[token] += gamma**later * reward[t]
                last = t
            total[token] += gamma ** (later + 1) * (0.0 if terminated[last] else next_value[last])
    return total


def derivative(function: Callable[[], Array], weights: Weights, name: str, direction: Array) -> float:
    """Return the derivative of ``function()`` along ``direction`` of one of the weights, by a complex step."""
    kept = weights[name]
    weights[name] = kept + 1j * _STEP * direction
    result = function()
    weights[name] = kept
    return float(np.imag(result) / _STEP)


def check_gradients(
    function: Callable[[], Array], groups: list[tuple[Weights, torch.nn.Module]], tolerance: float = 1e-10
) -> None:
    """Compare gradients of modules with the derivatives of ``function``, along a random direction of each weight."""
    generator = np.random.default_rng(0)
    for weights, module in groups:
        for name, parameter in module.named_parameters():
            direction = generator.standard_normal(parameter.shape)
            expected = derivative(function, weights, name, direction)
            found = 0.0 if parameter.grad is None else float((parameter.grad.numpy() * direction).sum())
            assert abs(found - expected) <= tolerance * max(1.0, abs(expected)), (name, found, expected)
