"""``Time``: access to past steps, for a single step or for all tokens of a stream at once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from recurl.recurrence.cells.attention import Attention, present_inputs


class Time(Protocol):
    """The operations of a step that access past steps; everything else in a step acts on each token separately.

    A :class:`~recurl.recurrence.Cell` whose ``step`` takes ``time`` and accesses its states only through it can be run
    over whole sequences by a single call of ``step``. The R rows are then the tokens of a flat stream, the states
    before the step are those stored at each token (only those at segment starts are used), and these methods return
    results for every token.
    """

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the state after ``h = a * h + b``, elementwise.

        Args:
            a: ``[R, *shape]``, or ``shape`` if it is the same at all steps.
            b: ``[R, *shape]``, or a tensor that can be expanded to it.
            h: state before the step, ``[R, *shape]``.
        """
        ...

    def recur_complex(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the result of :meth:`recur` for complex numbers given as pairs, so that shapes end in 2."""
        ...

    def count(self, before: Tensor, modulus: int) -> Tensor:
        """Return the number of steps modulo ``modulus``, this one included; exact in every dtype up to 256.

        Args:
            before: the number before the step, ``[R, *shape]``, rounded to a whole number.
            modulus: a positive number.
        """
        ...

    def recur_max(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the state after ``h = max(a + h, b)``, elementwise; all are ``[R, *shape]``."""
        ...

    def remember(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        before: Tensor,
        delta: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Write into a matrix of each head; return what it holds for the query, ``[R, heads, V]``, and the matrices.

        The matrix is ``S = a (I - b k k^T) S + b k v^T``, without the subtraction unless ``delta``; the result is
        ``S^T q``. Of whole sequences, the matrices are returned after the last token of each segment only.

        Args:
            query: q, ``[R, heads, K]``, scaled.
            key: k, ``[R, heads, K]``.
            value: v, ``[R, heads, V]``.
            log_decay: logarithm of a, ``[R, heads]``.
            rate: b, ``[R, heads]``.
            before: S before the step, ``[R, heads, K, V]``.
            delta: whether what S holds for the key is taken out before the value is written.
        """
        ...

    def window(self, x: Tensor, before: Tensor) -> Tensor:
        """Return the last inputs, ``x`` included.

        Args:
            x: ``[R, D]``.
            before: the W - 1 inputs before it, oldest first, ``[R, W - 1, D]``.

        Returns:
            ``[R, W, D]``; ``[:, 1:]`` is the state after the step.
        """
        ...

    def attend(self, attention: Attention, inputs: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the last inputs, the own included; return the result ``[R, heads, D]`` and the M inputs to keep.

        The weights are the softmax of query times key, plus the score of the distance.

        Args:
            attention: queries, keys and values.
            inputs: ``[R, E]``, of which the last number is 1.
            before: the M inputs before it, oldest first, ``[R, M, E]``; the last number is 0 where there is none.
        """
        ...


class OneStep:
    """Implementation of :class:`Time` for one step of every row.

    Example:
        >>> from recurl.recurrence import ONE_STEP
        >>> ONE_STEP.recur(torch.tensor(0.5), torch.ones(1, 2), torch.tensor([[2.0, 4.0]]))
        tensor([[2., 3.]])
    """

    def recur(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the state after ``h = a * h + b``."""
        return a * h + b

    def recur_complex(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the result of :meth:`recur` for complex numbers given as pairs."""
        return multiply(a, h) + b

    def count(self, before: Tensor, modulus: int) -> Tensor:
        """Return the number of steps modulo ``modulus``."""
        return (before.round() + 1) % modulus

    def recur_max(self, a: Tensor, b: Tensor, h: Tensor) -> Tensor:
        """Return the state after ``h = max(a + h, b)``."""
        return torch.maximum(a + h, b)

    def remember(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        rate: Tensor,
        before: Tensor,
        delta: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Write into a matrix of each head; return what it holds for the query, and the matrices."""
        state = log_decay.exp()[..., None, None] * before
        if delta:
            value = value - _read(state, key)
        state = state + (rate.unsqueeze(-1) * key).unsqueeze(-1) * value.unsqueeze(-2)
        return _read(state, query), state

    def window(self, x: Tensor, before: Tensor) -> Tensor:
        """Return the last inputs, including ``x``."""
        return torch.cat([before, x.unsqueeze(1)], 1)

    def attend(self, attention: Attention, inputs: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the last inputs; return the result and the inputs to keep."""
        window = self.window(inputs, before)[:, 1:]
        return attention.once(before), present_inputs(window)[0]


ONE_STEP = OneStep()


def _read(state: Tensor, key: Tensor) -> Tensor:
    return torch.einsum("rhkv,rhk->rhv", state, key)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of complex numbers given as pairs, ``[..., 2]``."""
    (a_re, a_im), (b_re, b_im) = a.unbind(-1), b.unbind(-1)
    return torch.stack([a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re], -1)
