"""Random number generators of the process: seeded, saved and restored together."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators.

    Args:
        seed: a non-negative integer; NumPy sees its lowest 32 bits.

    Example:
        >>> seed_everything(0); first = torch.rand(1)
        >>> seed_everything(0); torch.equal(first, torch.rand(1))
        True
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - third-party environments may draw from the global generator
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of the global generators as tensors and plain values.

    Example:
        >>> state = rng_state(); first = (random.random(), torch.rand(1))
        >>> set_rng_state(state); first == (random.random(), torch.rand(1))
        True
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - see seed_everything
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the global generators where :func:`rng_state` found them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002 - the legacy one
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


class GeneratorState:
    """A generator as a part of a checkpoint.

    Args:
        generator: the generator.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> state = GeneratorState(generator).state_dict()
        >>> first = torch.rand(1, generator=generator)
        >>> GeneratorState(generator).load_state_dict(state)
        >>> torch.equal(first, torch.rand(1, generator=generator))
        True
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> torch.Tensor:
        """Return the state."""
        return self._generator.get_state()

    def load_state_dict(self, state: torch.Tensor) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._generator.set_state(state)


@contextmanager
def preserved_rng() -> Generator[None]:
    """Put the global generators back, after the block, to where they were before it.

    Those of CUDA are left alone where nothing runs there.

    Example:
        >>> seed_everything(0); first = torch.rand(1)
        >>> seed_everything(0)
        >>> with preserved_rng():
        ...     _ = torch.rand(1), random.random()
        >>> torch.equal(first, torch.rand(1))
        True
    """
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - see above
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002 - see above
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
