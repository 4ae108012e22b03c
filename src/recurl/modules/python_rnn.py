"""LSTM and GRU networks that own their Parameters under torch.nn's names and run through recurl's backends."""

from __future__ import annotations

import math
import operator
from typing import ClassVar

import torch
from torch import Tensor, nn

from recurl.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.recurrence import (
    BACKENDS,
    DEFAULT_OPTIONS,
    Boundaries,
    Cell,
    LayerWeights,
    Options,
    Support,
    dropout_masks,
    run_stack,
    step_stack,
)
from recurl.recurrence import (
    GRU as GRU_CELL,
)
from recurl.recurrence import (
    LSTM as LSTM_CELL,
)


class RecurrentNet(nn.Module):
    """Base of :class:`LSTM` and :class:`GRU`: parameters, initialisation, one-step and whole-sequence evaluation.

    Parameters carry the names of ``torch.nn`` (``weight_ih_l0``, ``bias_hh_l1_reverse``, ...), so state dicts are
    interchangeable with ``torch.nn.LSTM`` and ``torch.nn.GRU``.
    """

    cell: ClassVar[Cell]

    def __init__(  # noqa: PLR0913 - the signature is torch.nn's
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        python_based: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(input_size, hidden_size, num_layers, proj_size, dropout)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size = bidirectional, proj_size
        if python_based and bidirectional:
            raise ArgumentError("python_based=True steps in time order: it can't be combined with bidirectional=True.")
        self.python_based = python_based
        for layer in range(num_layers):
            for suffix in self._suffixes(layer):
                for name, shape in self._shapes(layer).items():
                    empty = torch.empty(shape, device=device, dtype=dtype)
                    self.register_parameter(f"{name}_{suffix}", nn.Parameter(empty))
        self._names = tuple(self._parameters)
        self._cache: tuple[tuple[str, ...], tuple[object, ...], list[list[LayerWeights]]] = ((), (), [])
        self.reset_parameters()

    @property
    def num_directions(self) -> int:
        """D: 2 if bidirectional, else 1."""
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """P with projection, else H: the width of h, and of the features per direction."""
        return self.proj_size or self.hidden_size

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Width of each state, in the order of the cell's ``state_names``."""
        return (self.output_size, *(self.hidden_size for _ in self.cell.state_names[1:]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.weight.device

    @property
    def weight(self) -> Tensor:
        """One of the weights, as a witness of dtype and device."""
        weight = self.weight_hh_l0
        assert isinstance(weight, Tensor)
        return weight

    def reset_parameters(self) -> None:
        """Draw all parameters from U(-1/sqrt(H), 1/sqrt(H)), as ``torch.nn`` does."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def adopt(self, module: nn.RNNBase) -> None:
        """Take over the Parameter objects (not copies) and the training flag of a ``torch.nn`` module."""
        for name, parameter in module.named_parameters():
            self.register_parameter(name, parameter)
        self.train(module.training)

    def set_python_based(self, value: bool) -> None:
        """Choose between plain torch operations and torch.nn's kernels."""
        if self.bidirectional:
            raise UnsupportedError("A bidirectional network has no python_based form, so there is nothing to switch.")
        self.python_based = value

    def layer_weights(self) -> list[list[LayerWeights]]:
        """The parameters by layer, then by direction."""
        if torch.compiler.is_compiling():
            return self._collect_weights()
        names, tensors = tuple(self._parameters), tuple(self._parameters.values())
        known_names, known, weights = self._cache
        if names == known_names and all(map(operator.is_, tensors, known)):
            return weights
        weights = self._collect_weights()
        # Not kept: what torch.func, parametrizations or pruning put in the place of the Parameters.
        if names == self._names and all(type(tensor) is nn.Parameter for tensor in tensors):
            self._cache = names, tensors, weights
        return weights

    def _collect_weights(self) -> list[list[LayerWeights]]:
        return [
            [
                LayerWeights(
                    getattr(self, f"weight_ih_{suffix}"),
                    getattr(self, f"weight_hh_{suffix}"),
                    getattr(self, f"bias_ih_{suffix}") if self.bias else None,
                    getattr(self, f"bias_hh_{suffix}") if self.bias else None,
                    getattr(self, f"weight_hr_{suffix}") if self.proj_size else None,
                )
                for suffix in self._suffixes(layer)
            ]
            for layer in range(self.num_layers)
        ]

    def draw_masks(self, tokens: int) -> list[Tensor] | None:
        """Dropout masks between layers for ``tokens`` rows; None outside training."""
        if not self.training:
            return None
        width = self.output_size * self.num_directions
        return dropout_masks(self.num_layers, (tokens, width), self.dropout, self.weight)

    def step(
        self, x: Tensor, states: tuple[Tensor, ...] | None, is_init: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step: x ``[B, I]``, states ``[B, L, ...]`` -> features ``[B, P or H]``, states after.

        States that are None, and rows where ``is_init`` (``[B]`` or ``[B, 1]``) is true, count as zero.
        """
        masks = self.draw_masks(x.shape[0])
        return step_stack(self.cell, self.layer_weights(), x, states, masks, not self.python_based, is_init)

    def support(self, options: Options) -> Support:
        """What this network needs of a backend."""
        compiling = torch.compiler.is_compiling()
        return Support(self.cell, self.device, self.dtype, self.hidden_size, self.proj_size, options, compiling)

    def run(
        self,
        x: Tensor,
        states: tuple[Tensor, ...] | None,
        boundaries: Boundaries,
        backend: str,
        options: Options,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Whole sequences: x ``[N, I]``, states ``[N, L * D, ...]`` -> features ``[N, D * (P or H)]``, states after."""
        if self.python_based and backend == "pad":
            backend = "loop"
        chosen = BACKENDS.choose(backend, self.support(options))
        masks = self.draw_masks(x.shape[0])
        return run_stack(chosen, self.cell, self.layer_weights(), x, states, boundaries, masks, options)

    def _suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"][: self.num_directions]

    def _shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        rows = self.cell.num_gates * self.hidden_size
        inputs = self.output_size * self.num_directions if layer else self.input_size
        shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, inputs), "weight_hh": (rows, self.output_size)}
        if self.bias:
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        if self.proj_size:
            shapes["weight_hr"] = (self.proj_size, self.hidden_size)
        return shapes

    def extra_repr(self) -> str:
        """The arguments that differ from the defaults."""
        options = {
            "num_layers": (self.num_layers, 1),
            "bias": (self.bias, True),
            "dropout": (self.dropout, 0.0),
            "bidirectional": (self.bidirectional, False),
            "proj_size": (self.proj_size, 0),
        }
        changed = [f"{name}={value}" for name, (value, default) in options.items() if value != default]
        return ", ".join([str(self.input_size), str(self.hidden_size), *changed])

    def evaluate(self, x: Tensor, initial: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Whole rows without resets, in the shapes of ``torch.nn``: features and final states ``[L * D, B, ...]``."""
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            raise ArgumentError(
                f"The input must have 2 dimensions, [T, I], or 3, and end in input_size={self.input_size}; "
                f"got shape {list(x.shape)}."
            )
        if x.ndim == 2:
            states = None if initial is None else tuple(state.unsqueeze(1) for state in initial)
            rows = x.unsqueeze(0 if self.batch_first else 1)
            features, final = self.evaluate(rows, states)
            return features.squeeze(0 if self.batch_first else 1), tuple(state.squeeze(1) for state in final)
        if not self.batch_first:
            x = x.transpose(0, 1)
        batch, time = x.shape[:2]
        if time == 0:
            raise ArgumentError(f"A sequence must have at least one step, as in torch.nn; got shape {list(x.shape)}.")
        stored = None if initial is None else tuple(self._spread(state, batch, time) for state in initial)
        boundaries = Boundaries.from_cu_seqlens(torch.arange(batch + 1, device=x.device) * time, batch * time)
        features, after = self.run(
            x.reshape(batch * time, self.input_size), stored, boundaries, "fastest", DEFAULT_OPTIONS
        )
        features = features.unflatten(0, (batch, time))
        final = tuple(state.unflatten(0, (batch, time))[:, -1].transpose(0, 1) for state in after)
        return features if self.batch_first else features.transpose(0, 1), final

    @staticmethod
    def _spread(state: Tensor, batch: int, time: int) -> Tensor:
        """``[L * D, B, ...]`` to ``[B * T, L * D, ...]``, of which the first token of each row counts."""
        return state.transpose(0, 1).unsqueeze(1).expand(batch, time, -1, -1).flatten(0, 1)


class LSTM(RecurrentNet):
    """``torch.nn.LSTM`` on recurl's backends: same parameters, arguments, shapes and results; ``batch_first=True``.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L.
        bias: add biases.
        batch_first: whether input and features are ``[B, T, ...]`` or ``[T, B, ...]``.
        dropout: probability of dropping outputs between layers, in training.
        bidirectional: also run from end to start; D is 2 then, else 1.
        proj_size: P, width of the projected output; 0 for none.
        python_based: step by plain torch operations instead of ATen's cell kernels.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Example:
        >>> features, (h, c) = LSTM(4, 8, num_layers=2)(torch.randn(3, 5, 4))
        >>> features.shape, h.shape
        (torch.Size([3, 5, 8]), torch.Size([2, 3, 8]))
    """

    cell = LSTM_CELL

    def forward(self, x: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run ``x``, ``[B, T, I]`` or ``[T, I]``, from ``hx`` (h and c, ``[L * D, B, ...]``; zeros when None)."""
        features, (h, c) = self.evaluate(x, hx)
        return features, (h, c)


class GRU(RecurrentNet):
    """``torch.nn.GRU`` on recurl's backends; see :class:`LSTM` (there is no projection).

    Example:
        >>> features, h = GRU(4, 8)(torch.randn(3, 5, 4))
        >>> features.shape, h.shape
        (torch.Size([3, 5, 8]), torch.Size([1, 3, 8]))
    """

    cell = GRU_CELL

    def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run ``x``, ``[B, T, I]`` or ``[T, I]``, from ``hx`` (``[L * D, B, H]``; zeros when None)."""
        features, (h,) = self.evaluate(x, None if hx is None else (hx,))
        return features, h


class LSTMCell(nn.LSTMCell):
    """``torch.nn.LSTMCell`` in plain torch operations, so that every transform of torch (vmap, compile) takes it.

    Example:
        >>> h, c = LSTMCell(4, 8)(torch.randn(3, 4))
        >>> h.shape, c.shape
        (torch.Size([3, 8]), torch.Size([3, 8]))
    """

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:  # noqa: A002 - torch.nn's name
        """One step: ``input`` ``[B, I]`` or ``[I]``, ``hx`` h and c ``[B, H]`` or ``[H]`` (zeros when None)."""
        zero = input.new_zeros(*input.shape[:-1], self.hidden_size)
        h, c = _cell_weights(self).step(LSTM_CELL, input, (zero, zero) if hx is None else hx)
        return h, c


class GRUCell(nn.GRUCell):
    """``torch.nn.GRUCell`` in plain torch operations, so that every transform of torch (vmap, compile) takes it.

    Example:
        >>> GRUCell(4, 8)(torch.randn(3, 4)).shape
        torch.Size([3, 8])
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:  # noqa: A002 - torch.nn's name
        """One step: ``input`` ``[B, I]`` or ``[I]``, ``hx`` ``[B, H]`` or ``[H]`` (zeros when None)."""
        zero = input.new_zeros(*input.shape[:-1], self.hidden_size)
        (h,) = _cell_weights(self).step(GRU_CELL, input, (zero if hx is None else hx,))
        return h


def _cell_weights(cell: nn.RNNCellBase) -> LayerWeights:
    biases = (cell.bias_ih, cell.bias_hh) if cell.bias else (None, None)
    return LayerWeights(cell.weight_ih, cell.weight_hh, *biases)


def _check_sizes(
    input_size: object, hidden_size: object, num_layers: object, proj_size: object, dropout: float
) -> None:
    for name, size, least in (
        ("input_size", input_size, 1),
        ("hidden_size", hidden_size, 1),
        ("num_layers", num_layers, 1),
        ("proj_size", proj_size, 0),
    ):
        if not isinstance(size, int) or isinstance(size, bool):
            raise ArgumentTypeError(f"{name} must be an int, got {size!r}.")
        if size < least:
            raise ArgumentError(f"{name} must be at least {least}, got {size}.")
    if isinstance(proj_size, int) and isinstance(hidden_size, int) and proj_size >= hidden_size:
        raise ArgumentError(f"proj_size must be smaller than hidden_size={hidden_size}, got {proj_size}.")
    if not isinstance(dropout, int | float):  # pyright: ignore[reportUnnecessaryIsInstance] - users
        raise ArgumentTypeError(f"dropout must be a number, got {dropout!r}.")
    if not 0.0 <= dropout <= 1.0:
        raise ArgumentError(f"dropout must be a probability between 0 and 1, got {dropout}.")
