"""C++ forms of modules of torch.nn and tensordict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn

from recurl.core.keys import normalize_key
from recurl.core.torch_compat import DROPOUTS
from recurl.execution.compiled.compilation import Compilation, Signal, weight_of
from recurl.execution.compiled.translations import register_translation
from recurl.execution.explain import NotCompiled
from recurl.sequences.tensordict_compat import is_biased_softplus

_Writer = Callable[..., Signal | tuple[Signal, ...]]


def _linear(program: Compilation, layer: nn.Linear, x: Signal) -> Signal:
    out = program.inside(layer.out_features)
    weight: Any = weight_of(layer, "weight")
    program.program.linear(program.numbers(x, layer.in_features).value, weight, weight_of(layer, "bias"), out.value)
    return out


def _activation(name: str, low: str | float = 0.0, high: str | float = torch.inf) -> _Writer:
    """Return the translation of an activation; a bound may be the name of an attribute of the module."""

    def write(program: Compilation, layer: nn.Module, x: Signal) -> Signal:
        out = program.inside(program.numbers(x).value.columns)
        bounds = [float(getattr(layer, bound)) if isinstance(bound, str) else bound for bound in (low, high)]
        program.program.activate(name, x.value, out.value, *bounds)
        if getattr(layer, "inplace", False):
            program.overwrite(x)
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
    bias = weight_of(layer, "bias") if centered else None
    value = program.numbers(x, size).value
    program.program.layer_norm(value, weight_of(layer, "weight"), bias, eps, out.value, centered=centered)
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


def _network(program: Compilation, module: TensorDictModule) -> None:
    outputs = program.apply(module.module, *(program.read(normalize_key(key)) for key in module.in_keys))
    if len(outputs) != len(module.out_keys):
        raise NotCompiled(f"a network returns {len(outputs)} tensors for {len(module.out_keys)} keys")
    for key, signal in zip(module.out_keys, outputs, strict=True):
        program.write(normalize_key(key), signal)


_FORMS: dict[type, _Writer] = {
    nn.Linear: _linear,
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
for _class, _form in _FORMS.items():
    register_translation(_class, _form)
register_translation(nn.Sequential, _sequence, depends=("forward", "__iter__"))
register_translation(TensorDictModule, _network)
