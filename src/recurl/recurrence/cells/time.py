"""What a step does with time: one step of it, or through a backend's eyes all tokens of a stream."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Time(Protocol):
    """The three operations of a step that reach back in time; all else in it is the work of each token by itself.

    A :class:`~recurl.recurrence.Cell` whose ``step`` takes ``time`` and touches its states through it alone is run
    over whole sequences by its own definition: R rows are then the tokens of a flat stream, states before a step those
    stored at each token (of which the segment starts count), and what these methods return holds for every token.
    """

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the state after ``h = a * h + b``, elementwise.

        Args:
            a: ``[R, *shape]``, or ``shape`` itself if it is the same at all steps.
            b: ``[R, *shape]``, or what can be expanded to it.
            h: state before, ``[R, *shape]``.
        """
        ...

    def recur_complex(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return what :meth:`recur` does in complex numbers, each given as a pair: shapes end in 2."""
        ...

    def window(self, x: Tensor, before: Tensor) -> Tensor:
        """Return the last inputs, ``x`` included.

        Args:
            x: ``[R, D]``.
            before: the W - 1 inputs before it, oldest first, ``[R, W - 1, D]``.

        Returns:
            ``[R, W, D]``, of which ``[:, 1:]`` is the state after the step.
        """
        ...


class OneStep:
    """One step of every row.

    Example:
        >>> ONE_STEP.recur(torch.tensor(0.5), torch.ones(1, 2), torch.tensor([[2.0, 4.0]]))
        tensor([[2., 3.]])
    """

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the state after ``h = a * h + b``."""
        return a * h + b

    def recur_complex(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the result of :meth:`recur` for complex numbers given as pairs."""
        return multiply(a, h) + b

    def window(self, x: Tensor, before: Tensor) -> Tensor:
        """Return the last inputs, including ``x``."""
        return torch.cat([before, x.unsqueeze(1)], 1)


ONE_STEP = OneStep()


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of complex numbers given as pairs, ``[..., 2]``."""
    (a_re, a_im), (b_re, b_im) = a.unbind(-1), b.unbind(-1)
    return torch.stack([a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re], -1)
