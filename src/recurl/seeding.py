"""Seeds of random number generators, and the generators of the process: seeded, saved and restored together."""

from __future__ import annotations

import hashlib
import json
import operator
import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import numpy as np
import torch

__all__ = [
    "GeneratorState",
    "derive_seed",
    "env_seed",
    "preserved_rng",
    "rng_state",
    "seed_everything",
    "set_rng_state",
]

EnvPurpose = Literal["training", "restart", "evaluation", "fresh"]
"""What a run makes environments for: episodes of the training, those that begin after a checkpoint without
environments, those of the evaluations during training, and those of evaluations of the finished policy."""
_ENV_BLOCK = 2**29  # four purposes fill the non-negative 32-bit integers


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Return the seed of one generator, derived from that of a program: a hash of it and of the generator's purpose.

    Generators of one kind with equal seeds produce equal streams. So no generator is given the seed that the user
    chose, which others may have too (``torch.manual_seed(0)`` in a script), but one of its own: the first 63 bits of
    SHA-256, the same on every platform.

    Args:
        seed: the seed of the program, an integer.
        *purpose: what the generator is for, as names and numbers, such as ``"exploration"`` and the rank.

    Raises:
        TypeError: the seed is no integer, or a part of the purpose neither that nor a string.

    Example:
        >>> derive_seed(0, "exploration", 3)
        4178955089143346543
        >>> shuffle = torch.Generator().manual_seed(derive_seed(0, "minibatches"))
    """
    parts = [operator.index(seed), *(part if isinstance(part, str) else operator.index(part) for part in purpose)]
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1


def env_seed(seed: int, purpose: EnvPurpose, *numbers: int) -> int:
    """Return the seed of the first environment of a run that is made for a purpose; row ``i`` gets it plus ``i``.

    Environments are seeded by consecutive numbers, as Gymnasium does it, so those of one purpose can be divided over
    workers, groups, actors and ranks. Purposes have ranges of their own, of 2**29 seeds each, so their rows never have
    seeds in common. All are below 2**31: environments in other languages take a 32-bit integer.

    Args:
        seed: the seed of the run.
        purpose: what the environments are for.
        *numbers: which time, where they are made for it more than once.

    Example:
        >>> env_seed(0, "training") == env_seed(1, "training")
        False
        >>> env_seed(0, "evaluation") - env_seed(0, "training") > 2**28
        True
    """
    start = get_args(EnvPurpose).index(purpose) * _ENV_BLOCK
    return start + derive_seed(seed, "environments", purpose, *numbers) % (_ENV_BLOCK // 2)


def seed_everything(seed: int, *purpose: int | str) -> None:
    """Seed Python's, NumPy's and torch's global generators, each with a seed of its own.

    NumPy's legacy generator and torch's on the CPU are the same algorithm: with equal seeds their streams are equal.

    Args:
        seed: the seed of the program, an integer.
        *purpose: what is drawn from now on; see :func:`derive_seed`.

    Example:
        >>> seed_everything(0); first = torch.rand(1)
        >>> seed_everything(0); torch.equal(first, torch.rand(1))
        True
    """
    random.seed(derive_seed(seed, *purpose, "python"))
    legacy = derive_seed(seed, *purpose, "numpy") % 2**32
    np.random.seed(legacy)  # noqa: NPY002 - third-party environments may draw from the global generator
    torch.manual_seed(derive_seed(seed, *purpose, "torch"))


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
