"""Multi-layer network of one recurrent cell, which owns its Parameters and runs through recurl's backends."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.core.precision import resolve_precision
from recurl.core.torch_compat import is_compiling, parameters_of
from recurl.recurrence import (
    BACKENDS,
    DEFAULT_OPTIONS,
    Backend,
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
from recurl.sequences.index import Boundaries


class RecurrentNet(nn.Module):
    """Base class of :class:`LSTM`, :class:`GRU` and :class:`CellNet`: stacked layers of one cell.

    Parameters have the cell's names with the suffixes of ``torch.nn`` (``weight_ih_l0``, ``bias_hh_l1_reverse``,
    ...), so state dicts of LSTM and GRU are interchangeable with ``torch.nn.LSTM`` and ``torch.nn.GRU``.
    """

    cell: Cell
    _selection: tuple[tuple[object, ...], str] = ((), "")  # last request, and the backend selected for it

    def __init__(  # noqa: PLR0913 - the signature is torch.nn's
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
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
            raise ArgumentError(f"dtype must be a real floating-point dtype, got {dtype}.")
        if proj_size and not self.cell.projects:
            raise ArgumentError(f"The cell {self.cell} has no projection: proj_size must be 0, got {proj_size}.")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, float(dropout)
        self.bidirectional, self.proj_size = bidirectional, proj_size
        if python_based and bidirectional:
            raise ArgumentError("python_based=True runs in time order: it can't be combined with bidirectional=True.")
        self.python_based = python_based
        for layer in range(num_layers):
            for suffix in self._suffixes(layer):
                for name, shape in self._shapes(layer).items():
                    empty = torch.empty(shape, device=device, dtype=dtype)
                    self.register_parameter(f"{name}_{suffix}", nn.Parameter(empty))
        self._derive()
        self.reset_parameters()

    def _derive(self) -> None:
        """Set what follows from the sizes and the names of the parameters."""
        self.state_shapes = states_of(self.cell, self._sizes(0))
        # Names of the cell's parameters that each layer has.
        self._layer_parameters = [frozenset(self._shapes(layer)) for layer in range(self.num_layers)]
        self._weight_name = (
            f"{next(name for name in self.cell.parameter_names if name in self._layer_parameters[0])}_l0"
        )
        self._names = tuple(parameters_of(self))
        self._cache: tuple[tuple[str, ...], tuple[object, ...], list[list[Weights]]] = ((), (), [])
        remember(self.cell)

    @property
    def num_directions(self) -> int:
        """D: 2 if bidirectional, else 1."""
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """Width of h, and of the features per direction: P with projection, else H."""
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
        weight = getattr(self, self._weight_name)
        assert isinstance(weight, Tensor)
        return weight

    def reset_parameters(self, for_training: bool = False) -> None:
        """Reinitialize all parameters as the cell defines.

        Args:
            for_training: use the cell's initialization for the trainers.
        """
        for layer in range(self.num_layers):
            for suffix in self._suffixes(layer):
                parameters = {name: getattr(self, f"{name}_{suffix}") for name in self._shapes(layer)}
                self.cell.initialize_layer(parameters, self._sizes(layer), for_training=for_training)

    def adopt(self, module: nn.RNNBase) -> None:
        """Adopt the Parameter objects (not copies) and the training flag of a ``torch.nn`` module."""
        for name, parameter in module.named_parameters():
            self.register_parameter(name, parameter)
        self.train(module.training)

    def set_python_based(self, value: bool) -> None:
        """Choose between plain torch operations and torch.nn's kernels."""
        if self.bidirectional:
            raise UnsupportedError(
                "python_based can't be set on a bidirectional network, which has no implementation in Python."
            )
        self.python_based = value

    def layer_weights(self) -> list[list[Weights]]:
        """Return the parameters by layer, then by direction."""
        if is_compiling():
            return self._collect_weights()
        parameters = parameters_of(self)
        names, tensors = tuple(parameters), tuple(parameters.values())
        known_names, known, weights = self._cache
        if names == known_names and all(map(operator.is_, tensors, known)):
            return weights
        weights = self._collect_weights()
        # Not cached if torch.func, parametrizations or pruning have replaced the Parameters.
        if names == self._names and all(type(tensor) is nn.Parameter for tensor in tensors):
            self._cache = names, tensors, weights
        return weights

    def _collect_weights(self) -> list[list[Weights]]:
        return [
            [
                self.cell.pack(
                    [
                        getattr(self, f"{name}_{suffix}") if name in self._layer_parameters[layer] else None
                        for name in self.cell.parameter_names
                    ]
                )
                for suffix in self._suffixes(layer)
            ]
            for layer in range(self.num_layers)
        ]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Drop the selected backend: other backends may be available in this process.
        super().__setstate__({name: value for name, value in state.items() if name != "_selection"})
        remember(self.cell)

    def draw_masks(self, tokens: int) -> list[Tensor] | None:
        """Draw dropout masks between layers for ``tokens`` rows; None outside of training and without dropout."""
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
        """Run one step: x ``[B, I]``, states ``[B, L, *shape]`` -> features ``[B, P or H]``, next states.

        States are zero if None, and in rows where ``is_init`` (``[B]`` or ``[B, 1]``) is true.
        """
        masks, weights = self.draw_masks(x.shape[0]), self.layer_weights()
        fused = not self.python_based
        return step_stack(self.cell, weights, x, states, masks, fused, is_init, self.state_shapes, options)

    def support(self, options: Options) -> Support:
        """Return the requirements of this network on a backend."""
        weight, compiling = self.weight, is_compiling()
        return Support(self.cell, weight.device, weight.dtype, self.hidden_size, self.proj_size, options, compiling)

    def run(
        self,
        x: Tensor,
        states: tuple[Tensor, ...] | None,
        boundaries: Boundaries,
        backend: str,
        options: Options,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run sequences: x ``[*B, I]``, states ``[*B, L * D, *shape]`` -> features ``[*B, D * P or H]``, states."""
        if self.python_based and backend == "pad":
            backend = "loop"
        chosen, weights = self._backend(backend, options), self.layer_weights()
        masks = self.draw_masks(boundaries.num_tokens)
        return run_stack(chosen, self.cell, weights, x, states, boundaries, masks, options, self.state_shapes)

    def _backend(self, name: str, options: Options) -> Backend:
        """Return the backend for sequences, selected again only if something that the choice depends on changed."""
        if is_compiling():
            return BACKENDS.choose(name, self.support(options))
        weight = self.weight
        request = (BACKENDS.version, name, options, weight.dtype, weight.device)
        selection = self._selection  # read once: another thread may run the network with another backend
        if request != selection[0]:
            selection = self._selection = request, BACKENDS.choose(name, self.support(options)).name
        return BACKENDS.implementation_for(selection[1], self.cell)

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
            raise ArgumentError(f"The cell {self.cell} has no biases to omit: bias must be True.")
        return shapes

    def extra_repr(self) -> str:
        """Return the sizes and the arguments that differ from their defaults."""
        options = {
            "num_layers": (self.num_layers, 1),
            "bias": (self.bias, True),
            "dropout": (self.dropout, 0.0),
            "bidirectional": (self.bidirectional, False),
            "proj_size": (self.proj_size, 0),
        }
        changed = [f"{name}={value}" for name, (value, default) in options.items() if value != default]
        return ", ".join([str(self.input_size), str(self.hidden_size), *changed])

    def evaluate(
        self, x: Tensor, initial: tuple[Tensor, ...] | None, resets: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run whole rows as ``torch.nn`` does, from zeros again at every step with a reset.

        Args:
            x: ``[T, B, I]``, with ``batch_first`` ``[B, T, I]``; or ``[T, I]``.
            initial: states before the first step, each ``[L * D, B, *shape]`` (for ``[T, I]`` without B); zeros if
                None. That of a row isn't read if the row's first step has a reset.
            resets: bool, the shape of x without I: steps that begin a new episode. None for no resets.

        Returns:
            Features, x's shape with D * (P or H) in the place of I, and the states after the last step, like
            ``initial``.

        Raises:
            ArgumentError: shapes or dtypes don't fit; resets of a bidirectional network together with states.
            ArgumentTypeError: x is packed; an argument isn't a tensor.
        """
        self._check_rows(x, resets)
        if x.ndim == 2:
            batch_dim = 0 if self.batch_first else 1
            states = None if initial is None else tuple(state.unsqueeze(1) for state in initial)
            features, final = self.evaluate(
                x.unsqueeze(batch_dim), states, None if resets is None else resets.unsqueeze(batch_dim)
            )
            return features.squeeze(batch_dim), tuple(state.squeeze(1) for state in final)
        if not self.batch_first:
            x, resets = x.transpose(0, 1), None if resets is None else resets.transpose(0, 1)
        batch, time = x.shape[:2]
        rows = None if initial is None else self._rows_of(initial, batch)
        precision = resolve_precision("auto", x.device) if x.is_cuda else "ieee"
        options = Options(precision=precision)
        if time == 1 and not self.bidirectional:
            step, after = self.step(x[:, 0], rows, None if resets is None else resets[:, 0], options)
            features = step.unsqueeze(1)
        else:
            stored, boundaries = self._cut(rows, resets, batch, time, x.device)
            features, every = self.run(x.reshape(batch * time, x.shape[-1]), stored, boundaries, "fastest", options)
            features = features.unflatten(0, (batch, time))
            after = tuple(state.unflatten(0, (batch, time))[:, -1] for state in every)
        final = tuple(state.transpose(0, 1) for state in after)
        return features if self.batch_first else features.transpose(0, 1), final

    def flatten_parameters(self) -> None:
        """Do nothing; exists for compatibility with ``torch.nn``."""

    def _cut(
        self, rows: tuple[Tensor, ...] | None, resets: Tensor | None, batch: int, time: int, device: torch.device
    ) -> tuple[tuple[Tensor, ...] | None, Boundaries]:
        """Return the states as stored in the stream of all rows, and its segments."""
        if resets is None:
            cuts = Boundaries.from_cu_seqlens(torch.arange(batch + 1, device=device) * time, batch * time)
            if rows is None:
                return None, cuts
            # Of every token, without copies; only that of the first one is read.
            return tuple(one.unsqueeze(1).expand(batch, time, *one.shape[1:]).flatten(0, 1) for one in rows), cuts
        cuts = Boundaries.from_is_init(resets, batch_shape=resets.shape)
        if rows is None:
            return None, cuts
        if self.bidirectional:
            raise ArgumentError(
                "With resets a bidirectional network runs every segment from zeros in both directions: leave out the "
                "states, or the resets."
            )
        fresh = resets[:, 0]
        zeroed = (torch.where(fresh.reshape(batch, *(1,) * (one.ndim - 1)), 0, one) for one in rows)
        return tuple(zeroed), cuts

    def _check_rows(self, x: Tensor, resets: Tensor | None) -> None:
        if isinstance(x, PackedSequence):
            raise ArgumentTypeError(
                "Packed sequences aren't supported. Pad them (torch.nn.utils.rnn.pad_packed_sequence), or join several "
                "in one row and pass resets=, true where each begins."
            )
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - users
            raise ArgumentTypeError(f"The input must be a tensor, got {type(x).__name__}.")
        layout = "[B, T, I]" if self.batch_first else "[T, B, I]"
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            raise ArgumentError(
                f"The input must have 2 dimensions, [T, I], or 3, {layout}, and end in input_size={self.input_size}; "
                f"got shape {list(x.shape)}."
            )
        if x.shape[1 if self.batch_first and x.ndim == 3 else 0] == 0:
            raise ArgumentError(f"A sequence must have at least one step, as in torch.nn; got shape {list(x.shape)}.")
        if x.dtype != self.dtype and not (torch.is_autocast_enabled(x.device.type) and x.is_floating_point()):
            raise ArgumentError(
                f"The input has dtype {x.dtype} but the parameters {self.dtype}: convert one of them with .to()."
            )
        if resets is not None and (resets.shape != x.shape[:-1] or resets.dtype != torch.bool):
            raise ArgumentError(
                f"resets must be bool and have the input's shape without its last dimension, {list(x.shape[:-1])}; got "
                f"{list(resets.shape)} and {resets.dtype}. Flags of another dtype are converted by .bool()."
            )

    def _rows_of(self, initial: tuple[Tensor, ...], batch: int) -> tuple[Tensor, ...]:
        """Return checked states with rows first, ``[B, L * D, *shape]``."""
        slots = self.num_layers * self.num_directions
        expected = [[slots, batch, *shape] for shape in self.state_shapes]
        if [list(state.shape) for state in initial] != expected:
            names = ", ".join(self.cell.state_names)
            raise ArgumentError(
                f"The states ({names}) must have the shapes {expected} (layers x directions, batch, ...); got "
                f"{[list(state.shape) for state in initial]}."
            )
        return tuple(state.transpose(0, 1) for state in initial)


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
