"""Other linear recurrences without resets, forward and backward, on [rows, length, width].

For bench_linear_recurrence.py. Each factory takes a, b and a gradient of the result, and returns the function to time.
If a peer has another layout, its inputs are converted beforehand.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], Any]


def _gradients(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, grad: Tensor) -> Step:
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    return lambda: torch.autograd.grad(function(a, b), (a, b), grad)


def associative_scan(a: Tensor, b: Tensor, grad: Tensor) -> Step:
    scan = importlib.import_module("torch._higher_order_ops.associative_scan").associative_scan

    def combine(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    run = torch.compile(lambda a, b: scan(combine, (a, b), 1, combine_mode="pointwise")[1])
    return _gradients(run, a, b, grad)


def fla_hgrn(a: Tensor, b: Tensor, grad: Tensor) -> Step:
    """Coefficients as logarithms, zero states."""
    run = importlib.import_module("fla.ops.hgrn").chunk_hgrn
    return _gradients(lambda g, x: run(x, g)[0], a.log(), b, grad)


def accelerated_scan(a: Tensor, b: Tensor, grad: Tensor) -> Step:
    """Rows of channels, time last."""
    run = importlib.import_module("accelerated_scan.warp").scan
    a, b, grad = (one.transpose(1, 2).contiguous() for one in (a, b, grad))
    return _gradients(run, a, b, grad)


def jax_associative_scan(a: Tensor, b: Tensor, grad: Tensor) -> Step:
    jax: Any = importlib.import_module("jax")

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def loss(a: Any, b: Any, grad: Any) -> Any:
        return (jax.lax.associative_scan(combine, (a, b), axis=1)[1] * grad).sum()

    run = jax.jit(jax.grad(loss, (0, 1)))
    inputs = [jax.dlpack.from_dlpack(one.detach()) for one in (a, b, grad)]

    def step() -> None:
        jax.block_until_ready(run(*inputs))

    return step


def cudnn_lstm(a: Tensor, b: Tensor, grad: Tensor) -> Step:
    """A layer with the same number of units; a is not used."""
    if len(b) == 1:
        raise ValueError("one row of 131,072 steps takes seconds")
    lstm = torch.nn.LSTM(b.shape[2], b.shape[2], batch_first=True, device=b.device)
    x = b.detach().requires_grad_()
    return lambda: torch.autograd.grad(lstm(x)[0], [x, *lstm.parameters()], grad)


PEERS: list[tuple[str, str | None, Callable[[Tensor, Tensor, Tensor], Step]]] = [  # the slowest to compile last
    ("cuDNN LSTM", None, cudnn_lstm),
    ("JAX associative_scan", "jax", jax_associative_scan),
    ("fla chunk_hgrn", "fla", fla_hgrn),
    ("accelerated-scan", "accelerated_scan", accelerated_scan),
    ("torch associative_scan", None, associative_scan),
]
