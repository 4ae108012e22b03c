"""Checks for NaN and infinity in batches, losses and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.errors import NonFiniteError
from recurl.core.keys import NEXT, REWARD, NestedKey, next_key
from recurl.sequences.start_states import sparse_values

__all__ = ["BatchCheck", "all_finite", "check_finite", "first_nonfinite"]


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite, with a single read from the device.

    Example:
        >>> all_finite([torch.ones(2), torch.tensor([1])]), all_finite([torch.tensor([0.0, torch.nan])])
        (True, False)
    """
    if bool(_finite_sum(tensors)):
        return True
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    return all(bool(tensor.isfinite().all()) for tensor in floats)  # the sum of large finite numbers may overflow


def _finite_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return whether the sum of all numbers is finite, which implies that all are; a bool tensor on the device."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return torch.ones((), dtype=torch.bool)
    return torch.stack([tensor.sum().to(floats[0].device, torch.float64) for tensor in floats]).sum().isfinite()


def first_nonfinite(values: Mapping[str, float], names: Sequence[str]) -> str | None:
    """Return the name and value of the first number that isn't finite, or None if all are.

    Example:
        >>> first_nonfinite({"loss": 1.0, "grad_norm": float("nan")}, ["loss", "grad_norm"])
        'grad_norm was nan'
    """
    for name in names:
        if not -float("inf") < values[name] < float("inf"):
            return f"{name} was {values[name]:g}"
    return None


def check_finite(state: Any, what: str) -> None:
    """Check that a nested state has no tensor with NaN or infinity.

    Raises:
        NonFiniteError: if a tensor isn't finite; the message names it.

    Example:
        >>> check_finite({"weight": torch.tensor([torch.inf])}, "the policy")
        Traceback (most recent call last):
            ...
        recurl.core.errors.NonFiniteError: All numbers of the policy must be finite, but weight holds inf.
    """
    tensors = dict(_tensors(state, ""))
    if not all_finite(list(tensors.values())):
        name, value = next((name, value) for name, value in tensors.items() if not value.isfinite().all())
        worst = value[~value.isfinite()][0].item()
        raise NonFiniteError(f"All numbers of {what} must be finite, but {name} holds {worst}.")


def _tensors(state: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, dict | list | tuple):
        items: Any = cast(Any, state).items() if isinstance(state, dict) else enumerate(cast(Any, state))
        for key, part in items:
            yield from _tensors(part, f"{path}.{key}" if path else str(key))


class BatchCheck:
    """Check of batches for NaN and infinity in rewards, observations and hidden states.

    Args:
        observations: keys of the observations.
        states: keys of the policy's hidden states.

    Example:
        >>> from tensordict import TensorDict
        >>> after = {"observation": torch.zeros(2, 3, 1), "reward": torch.zeros(2, 3, 1)}
        >>> batch = TensorDict({"observation": torch.zeros(2, 3, 1), "next": after}, [2, 3])
        >>> check = BatchCheck(["observation"], [])
        >>> check(batch, 6) is None
        True
        >>> batch["next", "reward"][1, 2] = torch.nan
        >>> rows, culprit = check(batch, 6)
        >>> rows.tolist(), culprit
        ([False, True], 'The reward of environment 1 at step 2 of its batch (environment step 6) was nan')
    """

    def __init__(self, observations: Sequence[NestedKey], states: Sequence[NestedKey]) -> None:
        # Within a step, the policy's inputs come before their consequences.
        before = [*((f"observation {_quoted(key)}", key) for key in observations)]
        before += [(f"hidden state {_quoted(key)}", key) for key in states]
        after = [(f"next {name}", next_key(key)) for name, key in before]
        self._entries: list[tuple[str, Any]] = [*before, ("reward", (NEXT, REWARD)), *after]

    def __call__(self, batch: TensorDictBase, env_steps: int) -> tuple[Tensor, str] | None:
        """Return the affected rows, bool ``[B]``, and a description of the first fault; None if all is finite.

        Args:
            batch: ``[B, T]``.
            env_steps: environment steps taken, including those of the batch.
        """
        check = self.begin(batch, env_steps)
        return None if bool(check.finite) else check.culprit()

    def begin(self, batch: TensorDictBase, env_steps: int) -> PendingCheck:
        """Launch the check of a batch without waiting for its device."""
        entries = [(name, batch.get(key, None)) for name, key in self._entries]
        return PendingCheck([(name, entry) for name, entry in entries if entry is not None], batch.shape, env_steps)


class PendingCheck:
    """Launched check of a batch.

    Args:
        entries: the entries to check, by name; not all states are stored.
        shape: shape of the batch, ``[B, T]``.
        env_steps: environment steps taken, including those of the batch.

    Attributes:
        finite: bool tensor on the device of the batch. True only if all is finite; a False is almost always a fault,
            and :meth:`culprit` decides.
    """

    def __init__(self, entries: list[tuple[str, Any]], shape: torch.Size, env_steps: int) -> None:
        self._entries, self._shape, self._env_steps = entries, shape, env_steps
        self.finite = _finite_sum([sparse_values(entry) for _, entry in entries])

    def culprit(self) -> tuple[Tensor, str] | None:
        """Return the result of the check; see :class:`BatchCheck`."""
        values: list[Tensor] = [sparse_values(entry, placed=True) for _, entry in self._entries]
        if all_finite(values):
            return None
        shape = self._shape
        wrong = torch.stack([~value.isfinite().reshape(*shape, -1).all(-1) for value in values])  # [entries, B, T]
        step, entry = min((int(found.any(0).int().argmax()), i) for i, found in enumerate(wrong) if found.any())
        row = int(wrong[entry, :, step].int().argmax())
        numbers = values[entry][row, step]
        number = numbers[~numbers.isfinite()].flatten()[0].item()
        taken = self._env_steps - shape.numel() + step * shape[0] + row + 1
        where = f"environment {row} at step {step} of its batch (environment step {taken:,})"
        return wrong.any(0).any(-1), f"The {self._entries[entry][0]} of {where} was {number}"


def _quoted(key: NestedKey) -> str:
    return repr(key if isinstance(key, str) else ".".join(key))
