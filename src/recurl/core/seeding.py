"""Derivation of seeds, and seeding, saving and restoring the global random number generators."""

from __future__ import annotations

import hashlib
import json
import operator
import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, get_args

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
"""Purpose of a run's environments: training, training resumed from a checkpoint without environment states, evaluation
during training, and evaluation of the finished policy."""
_ENV_BLOCK = 2**29  # four purposes cover the non-negative 32-bit integers


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Derive the seed of one generator from the program's seed and the purpose of the generator.

    Generators of the same kind with equal seeds produce equal streams. The user's seed is therefore never used
    directly, as other code may use it too (``torch.manual_seed(0)`` in a script). The derived seed is the first 63 bits
    of a SHA-256 hash, the same on every platform.

    Args:
        seed: the seed of the program, an integer.
        *purpose: purpose of the generator, as names and numbers, such as ``"exploration"`` and the rank.

    Raises:
        TypeError: the seed is not an integer, or a part of the purpose is neither an integer nor a string.

    Example:
        >>> derive_seed(0, "exploration", 3)
        4178955089143346543
        >>> shuffle = torch.Generator().manual_seed(derive_seed(0, "minibatches"))
    """
    parts = [operator.index(seed), *(part if isinstance(part, str) else operator.index(part) for part in purpose)]
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:8], "big") >> 1


def env_seed(seed: int, purpose: EnvPurpose, *numbers: int) -> int:
    """Return the seed of the first environment of a run for a purpose; row ``i`` gets this seed plus ``i``.

    Environments have consecutive seeds, as in Gymnasium, so those of one purpose can be divided over workers, groups,
    actors and ranks. Each purpose has its own range of 2**29 seeds, so rows of different purposes never share a seed.
    All seeds are below 2**31, as environments written in other languages take a 32-bit integer.

    Args:
        seed: the seed of the run.
        purpose: purpose of the environments.
        *numbers: which instance, if there are several environments for the purpose.

    Example:
        >>> env_seed(0, "training") == env_seed(1, "training")
        False
        >>> env_seed(0, "evaluation") - env_seed(0, "training") > 2**28
        True
    """
    start = get_args(EnvPurpose).index(purpose) * _ENV_BLOCK
    return start + derive_seed(seed, "environments", purpose, *numbers) % (_ENV_BLOCK // 2)


def seed_everything(seed: int, *purpose: int | str) -> None:
    """Seed Python's, NumPy's and torch's global generators, each with a different derived seed.

    NumPy's legacy generator and torch's CPU generator use the same algorithm: equal seeds would give equal streams.

    Args:
        seed: the seed of the program, an integer.
        *purpose: purpose of the following draws; see :func:`derive_seed`.

    Example:
        >>> seed_everything(0); first = torch.rand(1)
        >>> seed_everything(0); torch.equal(first, torch.rand(1))
        True
    """
    import numpy as np  # noqa: PLC0415 - recurl.nn derives seeds without it

    random.seed(derive_seed(seed, *purpose, "python"))
    legacy = derive_seed(seed, *purpose, "numpy") % 2**32
    np.random.seed(legacy)  # noqa: NPY002 - third-party environments may draw from the global generator
    torch.manual_seed(derive_seed(seed, *purpose, "torch"))


def rng_state() -> dict[str, Any]:
    """Return the state of the global generators as tensors and plain values.

    Example:
        >>> import random
        >>> from recurl.core.seeding import set_rng_state
        >>> state = rng_state(); first = (random.random(), torch.rand(1))
        >>> set_rng_state(state); first == (random.random(), torch.rand(1))
        True
    """
    import numpy as np  # noqa: PLC0415 - recurl.nn derives seeds without it

    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - see seed_everything
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the global generators to a state returned by :func:`rng_state`."""
    import numpy as np  # noqa: PLC0415 - recurl.nn derives seeds without it

    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002 - legacy generator
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


class GeneratorState:
    """Adapter that saves and restores a generator in a checkpoint.

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
        """Return the state of the generator."""
        return self._generator.get_state()

    def load_state_dict(self, state: torch.Tensor) -> None:
        """Restore a :meth:`state_dict`."""
        self._generator.set_state(state)


@contextmanager
def preserved_rng() -> Generator[None]:
    """Restore the global generators after the block to their state before it.

    CUDA generators are included only if CUDA is initialized.

    Example:
        >>> import random
        >>> from recurl.core.seeding import seed_everything
        >>> seed_everything(0); first = torch.rand(1)
        >>> seed_everything(0)
        >>> with preserved_rng():
        ...     _ = torch.rand(1), random.random()
        >>> torch.equal(first, torch.rand(1))
        True
    """
    import numpy as np  # noqa: PLC0415 - recurl.nn derives seeds without it

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
