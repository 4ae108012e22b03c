"""State of objects that keep it in native memory: random generators, Atari's emulator, and MuJoCo."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from recurl.core.errors import ArgumentError
from recurl.core.seeding import derive_seed

__all__ = ["FOREIGN", "Foreign"]

_BITS = {
    kind.__name__: kind
    for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


class Foreign(NamedTuple):
    """Functions that save and restore such an object."""

    save: Callable[[Any], Any]
    """Return the state, as plain values."""
    restore: Callable[[Any, Any], None]
    """Restore the state of an object."""
    make: Callable[[Any], Any] | None = None
    """Create an object for a state; None if only an existing object can be used."""


def _generator_state(generator: np.random.Generator) -> dict[str, Any]:
    bits: Any = generator.bit_generator
    seeds = bits.seed_seq
    return {"bits": dict(bits.state), "seeds": dict(seeds.state) if type(seeds) is np.random.SeedSequence else None}


def _make_generator(state: dict[str, Any]) -> np.random.Generator:
    seeds = state["seeds"]
    return np.random.Generator(
        _BITS[state["bits"]["bit_generator"]](None if seeds is None else np.random.SeedSequence(**seeds))
    )


def _restore_generator(generator: np.random.Generator, state: dict[str, Any]) -> None:
    generator.bit_generator.state = _check_position(state["bits"])


def _check_position(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a NumPy bit generator after checking its position, which NumPy uses as an unchecked index."""
    position = state["state"].get("pos", 0) if state["bit_generator"] == "MT19937" else state.get("buffer_pos", 0)
    if not 0 <= position <= (624 if state["bit_generator"] == "MT19937" else 4):
        raise ArgumentError(f"A saved random generator is at position {position}, which is out of range.")
    return state


def _restore_ale(ale: Any, state: bytes) -> None:
    kind: Any = type(ale.cloneState())
    saved = kind.__new__(kind)
    saved.__setstate__(state)
    ale.restoreState(saved)


def _floats(holder: Any) -> dict[str, Any]:
    """Return the floating-point fields of a MuJoCo struct; integers are indices that C doesn't check.

    Arrays of contacts and constraints, whose size varies, are skipped: the next step starts by computing them.
    """
    found: dict[str, Any] = {}
    for name, member in vars(type(holder)).items():
        if isinstance(member, property) and not name.startswith(("_", "efc_", "iefc_", "contact")):
            value = getattr(holder, name)
            if type(value) is float or (isinstance(value, np.ndarray) and value.dtype.kind == "f"):
                found[name] = value if type(value) is float else np.array(value)
    return found


def _write_floats(holder: Any, saved: dict[str, Any]) -> None:
    for name, value in _floats(holder).items():
        if type(value) is float:
            setattr(holder, name, float(saved[name]))
        elif saved[name].shape == value.shape:
            getattr(holder, name)[...] = saved[name]


def _data_state(data: Any) -> dict[str, Any]:
    mujoco: Any = sys.modules["mujoco"]  # imported, as the object is an instance of one of its classes
    components: Any = mujoco.mjtState.mjSTATE_INTEGRATION
    integration = np.empty(mujoco.mj_stateSize(data.model, components))
    mujoco.mj_getState(data.model, data, integration, components)
    return {"integration": integration, "floats": _floats(data)}


def _restore_data(data: Any, state: dict[str, Any]) -> None:
    mujoco: Any = sys.modules["mujoco"]  # imported, as the object is an instance of one of its classes
    components: Any = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(data.model, data, state["integration"], components)
    mujoco.mj_forward(data.model, data)
    mujoco.mj_setState(data.model, data, state["integration"], components)
    _write_floats(data, state["floats"])  # environments read positions that lag one step behind


def _model_state(model: Any) -> dict[str, Any]:
    return {"model": _floats(model), "options": _floats(model.opt)}


def _restore_model(model: Any, state: dict[str, Any]) -> None:
    _write_floats(model, state["model"])
    _write_floats(model.opt, state["options"])


FOREIGN: dict[str, Foreign] = {
    "numpy.random._generator.Generator": Foreign(_generator_state, _restore_generator, _make_generator),
    "numpy.random.mtrand.RandomState": Foreign(
        lambda generator: dict(generator.get_state(legacy=False)),
        lambda generator, state: generator.set_state(_check_position(state)),
        lambda _: np.random.RandomState(derive_seed(0, "restored") % 2**32),  # the state is set afterwards
    ),
    "random.Random": Foreign(
        lambda generator: generator.getstate(),
        lambda generator, state: generator.setstate(state),
        lambda _: random.Random(derive_seed(0, "restored")),
    ),
    "torch._C.Generator": Foreign(
        lambda generator: generator.get_state(),
        lambda generator, state: generator.set_state(state),
        lambda _: torch.Generator(),
    ),
    "ale_py._ale_py.ALEInterface": Foreign(
        lambda ale: ale.cloneState(include_rng=True).__getstate__(),
        _restore_ale,
    ),
    "mujoco._structs.MjModel": Foreign(_model_state, _restore_model),
    "mujoco._structs.MjData": Foreign(_data_state, _restore_data),
}
"""Handlers of native objects, by type name."""
