"""C structures of the library, with the fields documented in ``src/recurl_native.h``.

The loader compares their sizes with those of the library, the tests each field with the header.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache

__all__ = [
    "STRUCTURES",
    "Adam",
    "Layer",
    "Linear",
    "Memory",
    "Op",
    "Parameter",
    "Pass",
    "Place",
    "Program",
    "Step",
    "StepWeights",
    "Structure",
    "Surrogate",
    "Weight",
]

_CODES: dict[type, str] = {ctypes.c_int64: "q", ctypes.c_void_p: "q", ctypes.c_double: "d"}


class Structure(ctypes.Structure):
    """Structure whose fields have eight bytes each."""

    @classmethod
    @cache
    def packer(cls, count: int = 1) -> struct.Struct:
        """Return the format of ``count`` structures in a row; pointers are packed as integers, null as 0."""
        return struct.Struct(count * "".join(_CODES[field[1]] for field in cls._fields_))

    @classmethod
    def numbers(cls) -> int:
        """Return the number of fields."""
        return len(cls._fields_)


def _integers(names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, type[ctypes.c_void_p]]]:
    return [(name, ctypes.c_void_p) for name in names.split()]


def _reals(names: str) -> list[tuple[str, type[ctypes.c_double]]]:
    return [(name, ctypes.c_double) for name in names.split()]


def _rows(name: str) -> list[tuple[str, type[ctypes.c_void_p] | type[ctypes.c_int64]]]:
    """Return a pointer to a matrix and the distance between its rows."""
    return [(name, ctypes.c_void_p), (f"{name}_stride", ctypes.c_int64)]


class Layer(Structure):
    """``recurl_layer``."""

    _fields_ = (
        *_integers("cell dtype isa threads tokens inputs hidden outputs"),
        *_pointers("starts"),
        *_rows("x"),
        *_pointers("w_ih w_hh b_ih b_hh w_hr"),
        *_rows("h0"),
        *_rows("c0"),
        *_pointers("gates h c unprojected"),
        *_rows("grad_h"),
        *_rows("grad_c"),
        *_pointers("grad_gates grad_output h_before grad_x grad_h0 grad_c0"),
        *_pointers("grad_w_ih grad_w_hh grad_b_ih grad_b_hh grad_w_hr"),
    )


class StepWeights(Structure):
    """``recurl_step_weights``."""

    _fields_ = _pointers("w_ih w_hh b_ih b_hh w_hr")


class Step(Structure):
    """``recurl_step``."""

    _fields_ = (
        *_integers("cell dtype isa threads rows layers inputs hidden outputs"),
        *_rows("x"),
        *_rows("is_init"),
        *_rows("h"),
        *_integers("h_layer_stride"),
        *_rows("c"),
        *_integers("c_layer_stride"),
        *_rows("features"),
        *_rows("h_after"),
        *_rows("c_after"),
    )


class Op(Structure):
    """``recurl_op``; its field ``from`` is ``source``, as ``from`` is a keyword."""

    _fields_ = (
        *_integers("kind variant source from_column inputs to to_column outputs"),
        *_pointers("w b"),
        *_reals("low high"),
        *_pointers("step layers"),
        ("slots", ctypes.c_int64 * 5),
    )


class Program(Structure):
    """``recurl_program``."""

    _fields_ = (*_integers("dtype isa given inner"), *_pointers("columns"), *_integers("count"), *_pointers("ops"))


class Place(Structure):
    """``recurl_place``."""

    _fields_ = (*_pointers("data"), *_integers("stride"))


class Weight(Structure):
    """``recurl_weight``."""

    _fields_ = (*_pointers("weight grad"), *_integers("count"))


class Pass(Structure):
    """``recurl_pass``."""

    _fields_ = (
        *_pointers("program given"),
        *_integers("tokens threads"),
        *_pointers("starts memory grads"),
        *_integers("weight_count"),
        *_pointers("weights"),
    )


class Surrogate(Structure):
    """``recurl_surrogate``."""

    _fields_ = (
        *_integers("density columns"),
        *_pointers("location scale value mask action low half log_prob advantage target old_value"),
        *_integers("normalize distance entropy"),
        *_reals("clip_epsilon clip_value entropy_coeff critic_coeff"),
        *_pointers("grad_location grad_scale grad_value results"),
    )


class Parameter(Structure):
    """``recurl_parameter``."""

    _fields_ = (*_pointers("value grad mean square steps"), *_integers("count"))


class Adam(Structure):
    """``recurl_adam``."""

    _fields_ = (
        *_integers("dtype isa count"),
        *_pointers("parameters loss norm"),
        *_reals("max_norm rate beta1 beta2 epsilon"),
    )


class Memory(Structure):
    """``recurl_memory``."""

    _fields_ = (*_pointers("data"), *_integers("rows bytes row_stride step_stride"))


class Linear(Structure):
    """``recurl_linear``."""

    _fields_ = (
        *_integers("dtype isa threads tokens width is_complex"),
        *_pointers("starts"),
        *_rows("a"),
        *_rows("b"),
        *_rows("states"),
        *_pointers("h"),
        *_rows("grad"),
        *_pointers("grad_a grad_b grad_states"),
    )


STRUCTURES: dict[str, type[Structure]] = {
    "recurl_layer": Layer,
    "recurl_step_weights": StepWeights,
    "recurl_step": Step,
    "recurl_op": Op,
    "recurl_program": Program,
    "recurl_place": Place,
    "recurl_weight": Weight,
    "recurl_pass": Pass,
    "recurl_surrogate": Surrogate,
    "recurl_parameter": Parameter,
    "recurl_adam": Adam,
    "recurl_memory": Memory,
    "recurl_linear": Linear,
}
"""By name in C, in the order of the header."""
