"""C++ forms of the modules and distributions of this package; samples use random numbers from torch's generator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recurl.core.keys import IS_INIT, NestedKey, normalize_key
from recurl.core.specs import Unbounded
from recurl.execution.compiled import (
    Compilation,
    Density,
    NotCompiled,
    Signal,
    register_density,
    register_translation,
)
from recurl.execution.compiled.compilation import weight_of
from recurl.execution.compiled.translations import DENSITIES, TRANSLATIONS
from recurl.modules.actors import Sampler
from recurl.modules.distributions import (
    Categorical,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    TanhNormal,
)
from recurl.modules.joint import ActionDistribution, IndependentNormal
from recurl.modules.networks import MLP, LearnedScale
from recurl.modules.normalization import ObservationNorm
from recurl.modules.qvalue import QValueModule
from recurl.modules.recurrent import RecurrentModule
from recurl.nn.recurrent_net import RecurrentNet
from recurl.sequences.mode import ExplorationType, exploration_type

__all__ = ["Draw", "choose", "density_of_choice"]


# -- modules of tensors


def _mlp(program: Compilation, network: MLP, *inputs: Signal) -> Signal:
    signal = inputs[0] if len(inputs) == 1 else program.joined(inputs)
    for layer in network:
        (signal,) = program.apply(layer, signal)
    return signal


def _observation_norm(program: Compilation, norm: ObservationNorm, observation: Signal) -> Signal:
    columns = norm.shape.numel()
    out = program.inside(columns)
    mean: Any = weight_of(norm.moments, "mean")
    scale: Any = weight_of(norm, "scale")
    program.program.normalize(program.numbers(observation, columns).value, mean, scale, norm.clip, out.value)
    return out


def _learned_scale(program: Compilation, layer: LearnedScale, loc: Signal) -> tuple[Signal, Signal]:
    del layer
    return loc, program.absent(loc.shape, "a learned scale")


register_translation(MLP, _mlp, depends=("forward", "__iter__"))
register_translation(LearnedScale, _learned_scale)
register_translation(ObservationNorm, _observation_norm)


# -- TensorDict modules


def _recurrent(program: Compilation, module: RecurrentModule) -> None:
    net, name = module.net, type(module).__name__
    if TRANSLATIONS.find(net) is not _recur:
        raise NotCompiled(f"{type(net).__name__} overrides a method of {RecurrentNet.__name__}")
    other_backend = module.recurrent_backend not in ("cpu", "fastest") or module.recurrent_recompute == "full"
    if program.sequences and other_backend:
        raise NotCompiled(f"{name} uses another backend, or recomputation")
    if (
        module.recurrent_mode is not program.sequences
        or net.bidirectional
        or net.python_based
        or (net.dropout and net.training)
    ):
        raise NotCompiled(f"{name} uses dropout, is bidirectional or python_based, or is in another mode")
    x = program.numbers(program.read(module.in_keys[0]), net.input_size)
    is_init = program.read(IS_INIT)
    if is_init.dtype is not torch.bool or math.prod(is_init.shape) != 1:
        raise NotCompiled("is_init isn't a single bool per row")
    shapes = [(net.num_layers, *shape) for shape in net.state_shapes]
    present = any(program.has(key) for key in module.state_keys)
    before = [program.read(key) for key in module.state_keys] if present else []
    if any(
        state.shape != shape or state.dtype is not program.dtype for state, shape in zip(before, shapes, strict=False)
    ):
        raise NotCompiled("a state has another shape or dtype than the module")
    after = [program.output(key, shape) for key, shape in zip(module.out_keys[1:], shapes, strict=True)]
    program.write(module.out_keys[0], _recur(program, net, x, is_init, before, after))


def _recur(
    program: Compilation, net: RecurrentNet, x: Signal, is_init: Signal, before: list[Signal], after: list[Signal]
) -> Signal:
    features = program.inside(net.output_size)
    program.program.recur(
        net.cell,
        net.layer_weights(),
        x.value,
        is_init.value,
        [state.value for state in before],
        [state.value for state in after],
        features.value,
    )
    return features


def _q_value(program: Compilation, module: QValueModule) -> None:
    if module.action_mask_key is not None:
        raise NotCompiled(f"{type(module).__name__} with a mask has no C++ implementation")
    values = program.numbers(program.read(module.action_value_key))
    action_key, values_key, chosen_key = module.out_keys
    one_hot = module.action_space == "one_hot"
    action = program.output(action_key, values.shape if one_hot else (), torch.int64)
    chosen = program.output(chosen_key, (1,))
    program.program.choose(values.value, None, None, action.value, chosen.value, one_hot=one_hot, value=True)
    program.write(values_key, values)


_OF_INPUTS = ("sequences", "_inputs", "_value", "_convert", "_states")
register_translation(
    RecurrentModule,
    _recurrent,
    depends=("forward", "net", "state_keys", "recurrent_mode", "_sequence", "_step", *_OF_INPUTS),
)
register_translation(RecurrentNet, _recur, depends=("step", "run", "draw_masks"))
register_translation(QValueModule, _q_value)


# -- samplers and distributions


class Draw(NamedTuple):
    """Argument of the C++ forms of a distribution.

    The form of :func:`~recurl.execution.compiled.register_translation` is called with a
    :class:`~recurl.execution.compiled.Compilation` and a ``Draw``; that of
    :func:`~recurl.execution.compiled.register_density` with a ``Draw``.

    Attributes:
        distribution: class of the distribution.
        parameters: entry of each distribution parameter, by argument name.
        options: further arguments of the distribution.
        action: key of the sample.
        log_prob: key of its log-probability, or None.
        deterministic: whether to take the deterministic sample.
    """

    distribution: Any
    parameters: Mapping[str, NestedKey]
    options: Mapping[str, Any]
    action: NestedKey
    log_prob: NestedKey | None
    deterministic: bool


def _draw_of(sampler: Any) -> Draw:
    return Draw(
        sampler.distribution_class,
        dict(zip(sampler.dist_keys, map(normalize_key, sampler.in_keys), strict=True)),
        sampler.distribution_kwargs,
        normalize_key(sampler.dist_sample_keys[0]),
        normalize_key(sampler.log_prob_key) if sampler.return_log_prob else None,
        (exploration_type() or sampler.default_interaction_type) is ExplorationType.DETERMINISTIC,
    )


def _sample(program: Compilation, sampler: Sampler) -> None:
    draw = _draw_of(sampler)
    translate = TRANSLATIONS.find(draw.distribution)
    if len(sampler.dist_sample_keys) != 1:
        raise NotCompiled(f"{type(sampler).__name__} draws several actions")
    if translate is None:
        raise NotCompiled(f"a sampler of {draw.distribution.__name__} has no C++ implementation")
    translate(program, draw)


def _density(sampler: Sampler) -> Density:
    draw = _draw_of(sampler)
    density = DENSITIES.find(draw.distribution)
    if density is None:
        raise NotCompiled(f"the density of {draw.distribution.__name__} has no C++ implementation")
    return density(draw)


register_translation(Sampler, _sample, depends=("forward", "link_entries", "get_dist"))
register_density(Sampler, _density, depends=("get_dist",))


def choose(program: Compilation, draw: Draw, *, refuses: bool) -> None:
    """C++ form of a categorical distribution; ``refuses``: NaN and masks that allow nothing are errors."""
    density = density_of_choice(draw)
    logits = program.numbers(program.read(density.location))
    mask = None if density.mask is None else program.read(density.mask)
    if mask is not None and (mask.dtype is not torch.bool or mask.shape != logits.shape):
        raise NotCompiled("the mask isn't bool with one value per choice")
    noise = None if draw.deterministic else program.noise(logits, Tensor.exponential_)
    action = program.output(draw.action, logits.shape if density.one_hot else (), torch.int64)
    program.program.choose(
        logits.value,
        None if noise is None else noise.value,
        None if mask is None else mask.value,
        action.value,
        _log_prob(program, draw),
        refuses=refuses and not draw.deterministic,
        one_hot=density.one_hot,
    )


def density_of_choice(draw: Draw) -> Density:
    """Density of a categorical distribution."""
    if draw.options or not {"logits"} <= set(draw.parameters) <= {"logits", "mask"}:
        raise _other_arguments(draw)
    return Density(draw.parameters["logits"], mask=draw.parameters.get("mask"), one_hot=draw.distribution.one_hot)


def _squash(program: Compilation, draw: Draw) -> None:
    density = _density_of_squashed(draw)
    loc, scale = (program.numbers(program.read(draw.parameters[name])) for name in ("loc", "scale"))
    if loc.shape != scale.shape:
        raise NotCompiled("location and scale differ in size")
    low, high = (torch.as_tensor(bound, dtype=program.dtype, device="cpu") for bound in (density.low, density.high))
    bounds = [bound.expand(loc.shape).contiguous() for bound in (low, 0.5 * (high - low))]
    noise = None if draw.deterministic else program.noise(loc, Tensor.normal_)
    action = program.output(draw.action, loc.shape)
    program.program.squash(
        loc.value,
        program.joined([scale]).value,
        None if noise is None else noise.value,
        (bounds[0], bounds[1]),
        action.value,
        _log_prob(program, draw),
    )


def _density_of_squashed(draw: Draw) -> Density:
    if not set(draw.options) <= {"low", "high"} or set(draw.parameters) != {"loc", "scale"}:
        raise _other_arguments(draw)
    return Density(draw.parameters["loc"], draw.parameters["scale"], **draw.options)


def _mean(program: Compilation, draw: Draw, loc: Signal) -> None:
    """Write the mean of a normal distribution without bounds as the greedy action."""
    if not draw.deterministic:
        raise NotCompiled("a sample of a normal distribution without bounds is not drawn in C++")
    program.write(draw.action, loc)
    if draw.log_prob is not None:
        program.write(draw.log_prob, program.absent((), "the density of a normal distribution without bounds"))


def _mean_of_normal(program: Compilation, draw: Draw) -> None:
    if not set(draw.options) <= {"event_dims"} or set(draw.parameters) != {"loc", "scale"}:
        raise _other_arguments(draw)
    _mean(program, draw, program.read(draw.parameters["loc"]))


def _mean_of_part(program: Compilation, draw: Draw) -> None:
    first, *others = draw.options["parts"]
    if others or not isinstance(first.spec, Unbounded):
        raise NotCompiled("an action of several parts, or of integers with a shape, has no C++ implementation")
    outputs = program.numbers(program.read(draw.parameters["outputs"]), first.parameters)
    _mean(program, draw, outputs.part(0, first.parameters // 2)._replace(shape=tuple(first.spec.shape)))


def _log_prob(program: Compilation, draw: Draw) -> Any:
    return None if draw.log_prob is None else program.output(draw.log_prob, ()).value


def _other_arguments(draw: Draw) -> NotCompiled:
    arguments = ", ".join([*draw.parameters, *draw.options])
    return NotCompiled(f"{draw.distribution.__name__} of {arguments} has no C++ implementation")


for _class in (Categorical, OneHotCategorical, MaskedCategorical, MaskedOneHotCategorical):
    register_translation(_class, partial(choose, refuses=True), depends=None)
    register_density(_class, density_of_choice, depends=None)
register_translation(TanhNormal, _squash, depends=None)
register_density(TanhNormal, _density_of_squashed, depends=None)
register_translation(IndependentNormal, _mean_of_normal, depends=None)
register_translation(ActionDistribution, _mean_of_part, depends=None)
