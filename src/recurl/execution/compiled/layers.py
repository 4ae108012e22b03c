"""Translation of layers of torch.nn and tensordict to operations of the C++ library, by exact type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict.nn import NormalParamExtractor
from torch import nn

from recurl.core.torch_compat import DROPOUTS
from recurl.execution.compiled.compilation import Compilation, Signal
from recurl.execution.explain import NotCompiled
from recurl.sequences.tensordict_compat import is_biased_softplus

__all__ = ["LAYERS"]

_Writer = Callable[..., Signal | tuple[Signal, ...]]


def _linear(program: Compilation, layer: nn.Linear, x: Signal) -> Signal:
    out = program.inside(layer.out_features)
    program.program.linear(program.numbers(x, layer.in_features).value, layer.weight, layer.bias, out.value)
    return out


def _activation(name: str, low: str | float = 0.0, high: str | float = torch.inf) -> _Writer:
    """Return the translation of an activation; a bound may be the name of an attribute of the module."""

    def write(program: Compilation, layer: nn.Module, x: Signal) -> Signal:
        out = program.inside(program.numbers(x).value.columns)
        bounds = [float(getattr(layer, bound)) if isinstance(bound, str) else bound for bound in (low, high)]
        program.program.activate(name, x.value, out.value, *bounds)
        return out

    return write


def _same(program: Compilation, layer: nn.Module, x: Signal) -> Signal:
    if isinstance(layer, DROPOUTS) and layer.training:
        raise NotCompiled(f"{type(layer).__name__} in training draws random numbers")
    return x


def _sequence(program: Compilation, layers: nn.Sequential, *inputs: Signal) -> tuple[Signal, ...]:
    for layer in layers:
        inputs = program.apply(layer, *inputs)
    return inputs


def _norm(program: Compilation, layer: Any, x: Signal, *, centered: bool) -> Signal:
    (size,) = layer.normalized_shape if len(layer.normalized_shape) == 1 else (None,)
    if size is None:
        raise NotCompiled(f"{type(layer).__name__} over several dimensions")
    out = program.inside(size)
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    bias = layer.bias if centered else None
    value = program.numbers(x, size).value
    program.program.layer_norm(value, layer.weight, bias, eps, out.value, centered=centered)
    return out


def _normal_parameters(program: Compilation, layer: NormalParamExtractor, x: Signal) -> tuple[Signal, Signal]:
    mapping: Any = layer.scale_mapping
    lowest: Any = layer.scale_lb
    columns = program.numbers(x).value.columns
    half = columns // 2
    if not is_biased_softplus(mapping) or isinstance(lowest, torch.Tensor) or columns % 2:
        raise NotCompiled("a scale mapping other than biased softplus")
    scale = program.inside(half)
    program.program.positive(
        x.value.part(half, half), float(mapping.bias), float(mapping.min_val), float(lowest), scale.value
    )
    return x.part(0, half), scale


LAYERS: dict[type, _Writer] = {
    nn.Linear: _linear,
    nn.Sequential: _sequence,
    nn.Identity: _same,
    nn.Dropout: _same,
    nn.Tanh: _activation("tanh"),
    nn.Sigmoid: _activation("sigmoid"),
    nn.SiLU: _activation("silu"),
    nn.ReLU: _activation("clamp"),
    nn.ReLU6: _activation("clamp", 0.0, 6.0),
    nn.Hardtanh: _activation("clamp", "min_val", "max_val"),
    nn.ELU: _activation("elu", "alpha"),
    nn.LeakyReLU: _activation("leaky", "negative_slope"),
    nn.LayerNorm: partial(_norm, centered=True),
    nn.RMSNorm: partial(_norm, centered=False),
    NormalParamExtractor: _normal_parameters,
}
