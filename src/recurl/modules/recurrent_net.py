"""A network of one recurrent cell that owns its Parameters and runs through recurl's backends."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recurl.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.recurrence import (
    BACKENDS,
    DEFAULT_OPTIONS,
    Backend,
    Boundaries,
    Cell,
    Options,
    Shape,
    Sizes,
    Support,
    Weights,
    check_parameters,
    dropout_masks,
    remember,
    run_stack,
    states_of,
    step_stack,
)


class RecurrentNet(nn.Module):
    """Layers of one cell: parameters, initialisation, one-step and whole-sequence evaluation.

    Parameters carry the cell's names with the suffixes of ``torch.nn`` (``weight_ih_l0``, ``bias_hh_l1_reverse``,
    ...), so state dicts of LSTM and GRU are interchangeable with ``torch.nn.LSTM`` and ``torch.nn.GRU``.
    """

    cell: Cell
    _served: tuple[tuple[object, ...], str] = ((), "")  # what was asked for last, and the backend that serves

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
        if dtype is not None and not dtype.is_floating_point:
            raise ArgumentError(f"dtype must be one of real floating-point numbers, got {dtype}.")
        if proj_size and not self.cell.projects:
            raise ArgumentError(f"The cell {self.cell} has no projection: proj_size must be 0, got {proj_size}.")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size = bidirectional, proj_size
        if python_based and bidirectional:
            raise ArgumentError("python_based=True steps in time order: it can't be combined with bidirectional=True.")
        self.python_based = python_based
        self.state_shapes = states_of(self.cell, self._sizes(0))
        # Of each layer: which of the cell's parameters it has.
        self._given = [frozenset(self._shapes(layer)) for layer in range(num_layers)]
        self._first = f"{next(name for name in self.cell.parameter_names if name in self._given[0])}_l0"
        for layer in range(num_layers):
            for suffix in self._suffixes(layer):
                for name, shape in self._shapes(layer).items():
                    empty = torch.empty(shape, device=device, dtype=dtype)
                    self.register_parameter(f"{name}_{suffix}", nn.Parameter(empty))
        self._names = tuple(self._parameters)
        self._cache: tuple[tuple[str, ...], tuple[object, ...], list[list[Weights]]] = ((), (), [])
        remember(self.cell)
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
        """Number of elements of each state of one row and layer, in the order of the cell's ``state_names``."""
        return tuple(math.prod(shape) for shape in self.state_shapes)

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
        """One of the weights, used to read dtype and device."""
        weight = getattr(self, self._first)
        assert isinstance(weight, Tensor)
        return weight

    def reset_parameters(self, for_training: bool = False) -> None:
        """Draw all parameters anew, as the cell says.

        Args:
            for_training: use the cell's initialisation for the trainers.
        """
        for layer in range(self.num_layers):
            for suffix in self._suffixes(layer):
                parameters = {name: getattr(self, f"{name}_{suffix}") for name in self._shapes(layer)}
                self.cell.initialize_layer(parameters, self._sizes(layer), for_training=for_training)

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

    def layer_weights(self) -> list[list[Weights]]:
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

    def _collect_weights(self) -> list[list[Weights]]:
        return [
            [
                self.cell.pack(
                    [
                        getattr(self, f"{name}_{suffix}") if name in self._given[layer] else None
                        for name in self.cell.parameter_names
                    ]
                )
                for suffix in self._suffixes(layer)
            ]
            for layer in range(self.num_layers)
        ]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Without who served: in this process there may be other backends.
        super().__setstate__({name: value for name, value in state.items() if name != "_served"})
        remember(self.cell)

    def draw_masks(self, tokens: int) -> list[Tensor] | None:
        """Dropout masks between layers for ``tokens`` rows; None outside training and without dropout."""
        if not self.dropout or not self.training:
            return None
        width = self.output_size * self.num_directions
        return dropout_masks(self.num_layers, (tokens, width), self.dropout, self.weight)

    def step(
        self,
        x: Tensor,
        states: tuple[Tensor, ...] | None,
        is_init: Tensor | None = None,
        options: Options = DEFAULT_OPTIONS,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step: x ``[B, I]``, states ``[B, L, *shape]`` -> features ``[B, P or H]``, states after.

        States that are None, and rows where ``is_init`` (``[B]`` or ``[B, 1]``) is true, count as zero.
        """
        masks, weights = self.draw_masks(x.shape[0]), self.layer_weights()
        fused = not self.python_based
        return step_stack(self.cell, weights, x, states, masks, fused, is_init, self.state_shapes, options)

    def support(self, options: Options) -> Support:
        """What this network needs of a backend."""
        weight, compiling = self.weight, torch.compiler.is_compiling()
        return Support(self.cell, weight.device, weight.dtype, self.hidden_size, self.proj_size, options, compiling)

    def run(
        self,
        x: Tensor,
        states: tuple[Tensor, ...] | None,
        boundaries: Boundaries,
        backend: str,
        options: Options,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Whole sequences: x ``[*B, I]``, states ``[*B, L * D, *shape]`` -> features ``[*B, D * P or H]``, states."""
        if self.python_based and backend == "pad":
            backend = "loop"
        chosen, weights = self._backend(backend, options), self.layer_weights()
        masks = self.draw_masks(boundaries.num_tokens)
        return run_stack(chosen, self.cell, weights, x, states, boundaries, masks, options, self.state_shapes)

    def _backend(self, name: str, options: Options) -> Backend:
        """Who runs sequences; looked at anew where something has changed that the choice depends on."""
        if torch.compiler.is_compiling():
            return BACKENDS.choose(name, self.support(options))
        weight = self.weight
        asked = (BACKENDS.version, name, options, weight.dtype, weight.device)
        served = self._served  # read once: another thread may run the network by another backend
        if asked != served[0]:
            served = self._served = asked, BACKENDS.choose(name, self.support(options)).name
        return BACKENDS.serving(served[1], self.cell)

    def _suffixes(self, layer: int) -> list[str]:
        return [f"l{layer}", f"l{layer}_reverse"][: self.num_directions]

    def _sizes(self, layer: int) -> Sizes:
        inputs = self.output_size * self.num_directions if layer else self.input_size
        return Sizes(inputs, self.hidden_size, self.bias, self.proj_size)

    def _shapes(self, layer: int) -> Mapping[str, Shape]:
        sizes = self._sizes(layer)
        shapes = self.cell.parameters(sizes)
        check_parameters(self.cell, shapes)
        if not self.bias and shapes == self.cell.parameters(replace(sizes, bias=True)):
            raise ArgumentError(f"The cell {self.cell} has no biases that could be left out: bias must be True.")
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
        rows = state.transpose(0, 1).unsqueeze(1)
        return rows.expand(batch, time, *rows.shape[2:]).flatten(0, 1)


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
