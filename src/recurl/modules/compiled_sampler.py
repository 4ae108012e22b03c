"""Compilation of samplers to C++, with random numbers from torch's generator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recurl.core.keys import NestedKey
from recurl.execution.compiled import Compilation, Density, NotCompiled

__all__ = ["compile_sample", "density_of"]


def compile_sample(
    program: Compilation,
    distribution: type,
    parameters: Mapping[str, NestedKey],
    options: Mapping[str, Any],
    outputs: tuple[NestedKey, NestedKey | None],
    *,
    deterministic: bool,
) -> None:
    """Compile the drawing of a sample and its log-probability.

    Args:
        program: the compilation to extend.
        distribution: class of the distribution.
        parameters: entry of each distribution parameter, by argument name.
        options: further arguments of the distribution.
        outputs: key of the sample, and key of the log-probability or None.
        deterministic: take the deterministic sample.

    Raises:
        NotCompiled: the distribution has no C++ implementation.
    """
    if _is_categorical(distribution, parameters, options):
        _choose(program, distribution, parameters, outputs, deterministic=deterministic)
    elif _is_squashed_normal(distribution, parameters, options):
        _squash(program, parameters, options, outputs, deterministic=deterministic)
    else:
        raise NotCompiled(f"a sampler of {distribution.__name__} has no C++ implementation")


def _is_categorical(distribution: type, parameters: Mapping[str, NestedKey], options: Mapping[str, Any]) -> bool:
    known = vars(distribution).get("draws_choice") is not None
    return known and not options and {"logits"} <= set(parameters) <= {"logits", "mask"}


def _is_squashed_normal(distribution: type, parameters: Mapping[str, NestedKey], options: Mapping[str, Any]) -> bool:
    known = bool(vars(distribution).get("draws_squashed"))
    return known and set(options) <= {"low", "high"} and set(parameters) == {"loc", "scale"}


def density_of(distribution: Any, parameters: Mapping[str, NestedKey], options: Mapping[str, Any]) -> Density:
    """Return the density of a distribution for the C++ library. Arguments as in :func:`compile_sample`.

    Raises:
        NotCompiled: the distribution has no C++ implementation.
    """
    if _is_categorical(distribution, parameters, options):
        return Density(parameters["logits"], mask=parameters.get("mask"), one_hot=distribution.one_hot)
    if _is_squashed_normal(distribution, parameters, options):
        bounds = {name: options[name] for name in ("low", "high") if name in options}
        return Density(parameters["loc"], parameters["scale"], **bounds)
    raise NotCompiled(f"the density of {distribution.__name__} has no C++ implementation")


def _choose(
    program: Compilation,
    distribution: Any,
    parameters: Mapping[str, NestedKey],
    outputs: tuple[NestedKey, NestedKey | None],
    *,
    deterministic: bool,
) -> None:
    logits = program.numbers(program.read(parameters["logits"]))
    mask = program.read(parameters["mask"]) if "mask" in parameters else None
    if mask is not None and (mask.dtype is not torch.bool or mask.shape != logits.shape):
        raise NotCompiled("the mask isn't bool with one value per choice")
    noise = None if deterministic else program.noise(logits, Tensor.exponential_)
    one_hot: bool = distribution.one_hot
    action = program.output(outputs[0], logits.shape if one_hot else (), torch.int64)
    program.program.choose(
        logits.value,
        None if noise is None else noise.value,
        None if mask is None else mask.value,
        action.value,
        _log_prob(program, outputs),
        refuses=vars(distribution)["draws_choice"] and not deterministic,
        one_hot=one_hot,
    )


def _squash(
    program: Compilation,
    parameters: Mapping[str, NestedKey],
    options: Mapping[str, Any],
    outputs: tuple[NestedKey, NestedKey | None],
    *,
    deterministic: bool,
) -> None:
    loc, scale = (program.numbers(program.read(parameters[name])) for name in ("loc", "scale"))
    if loc.shape != scale.shape:
        raise NotCompiled("location and scale differ in size")
    low, high = (
        torch.as_tensor(options.get(name, default), dtype=program.dtype, device="cpu")
        for name, default in (("low", -1.0), ("high", 1.0))
    )
    bounds = [bound.expand(loc.shape).contiguous() for bound in (low, 0.5 * (high - low))]
    noise = None if deterministic else program.noise(loc, Tensor.normal_)
    action = program.output(outputs[0], loc.shape)
    program.program.squash(
        loc.value,
        program.joined([scale]).value,
        None if noise is None else noise.value,
        (bounds[0], bounds[1]),
        action.value,
        _log_prob(program, outputs),
    )


def _log_prob(program: Compilation, outputs: tuple[NestedKey, NestedKey | None]) -> Any:
    return None if outputs[1] is None else program.output(outputs[1], ()).value
