"""C++ forms of the networks of a run."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import nn

from recurl.execution.compiled import Compilation, NotCompiled, Signal, register_density, register_translation
from recurl.modules.cpp_forms import choose, density_of_choice
from recurl.trainers.networks.action_head import MaskedNaNSafeCategorical, NaNSafeCategorical
from recurl.trainers.networks.encoders import VectorEncoder
from recurl.trainers.networks.observations import FlatObservation, IntegerEncoder

_TANH = nn.Tanh()


def _flat(program: Compilation, flat: FlatObservation, *observations: Signal) -> Signal:
    parts = [
        program.apply(reader, value)[0]
        if isinstance(reader, IntegerEncoder)
        else _numbers(program, value, **reader.keywords)
        for reader, value in zip(flat.readers, observations, strict=True)
    ]
    return parts[0] if len(parts) == 1 else program.joined(parts)


def _numbers(program: Compilation, value: Signal, *, dims: int, divisor: int | None = None) -> Signal:
    if program.dtype is not torch.float32 or len(value.shape) != dims:
        raise NotCompiled(f"observations {list(value.shape)} for a network in {program.dtype}")
    if divisor is None and value.dtype is torch.float32:
        return Signal(value.value, (value.value.columns,), value.dtype)
    return program.converted(value, 1 if divisor is None else divisor)


def _codes(program: Compilation, encoder: IntegerEncoder, value: Signal) -> Signal:
    if encoder.table is not None or value.dtype is not torch.int64 or program.dtype is not torch.float32:
        raise NotCompiled("an embedding, or integers that are not int64")
    out = program.inside(encoder.features)
    starts = [*encoder.offset.tolist(), encoder.features]
    for place, (begin, end) in enumerate(pairwise(starts)):
        program.program.one_hot(value.value.part(place, 1), out.value.part(begin, end - begin))
    return out


def _vector(program: Compilation, encoder: VectorEncoder, *observations: Signal) -> Signal:
    (embedding,) = program.apply(encoder.flat, *observations)
    if encoder.norm is not None:
        numbers, features = encoder.flat.numbers, encoder.flat.features
        parts = [(0, numbers), (numbers, features - numbers)]
        first, *rest = (embedding.part(begin, columns) for begin, columns in parts if columns)
        (normalized,) = program.apply(encoder.norm, first)
        embedding = program.joined([normalized, *rest]) if rest else normalized
    for layer in (encoder.layer, *encoder.deeper):
        (embedding,) = program.apply(layer, embedding)
        (embedding,) = program.apply(_TANH, embedding)
    return embedding


register_translation(FlatObservation, _flat)
register_translation(IntegerEncoder, _codes)
register_translation(VectorEncoder, _vector, depends=("forward", "_normalized"))
for _class in (NaNSafeCategorical, MaskedNaNSafeCategorical):
    register_translation(_class, partial(choose, refuses=False), depends=None)
    register_density(_class, density_of_choice, depends=None)
