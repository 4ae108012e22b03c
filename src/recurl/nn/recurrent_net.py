"""Multi-layer network of one recurrent cell, which owns its Parameters and runs through recurl's backends."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.core.torch_compat import is_compiling, parameters_of
from recurl.nn.plain import plain_layer
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
    recurrent_backend = "fastest"
    """Backend of calls without a TensorDict: see :class:`LSTM`."""
    _cache: tuple[tuple[str, ...], tuple[object, ...], list[list[Weights]]] | None = None  # of the last parameters
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        python_based: bool = False,
        recurrent_backend: str = "fastest",
    ) -> None:
        super().__init__()
        BACKENDS.check_name(recurrent_backend)
        self.recurrent_backend = recurrent_backend
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
        for shapes, suffix in self._places():
            for name, shape in shapes.items():
                empty = torch.empty(shape, device=device, dtype=dtype)
                self.register_parameter(f"{name}_{suffix}", nn.Parameter(empty))
        self._derive()
        self.reset_parameters()

    def _derive(self) -> None:
        """Set what follows from the sizes and the names of the parameters."""
        self.state_shapes = states_of(self.cell, self._sizes(0))
        self._names = tuple(f"{name}_{suffix}" for shapes, suffix in self._places() for name in shapes)
        first = self._shapes(0)
        self._weight_name = f"{next(name for name in self.cell.parameter_names if name in first)}_l0"
        self._cache = None
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
        cached = self._cache  # read once: another thread may replace it
        if cached is not None and names == cached[0] and all(map(operator.is_, tensors, cached[1])):
            return cached[2]
        weights = self._collect_weights()
        # Not cached if torch.func, parametrizations or pruning have replaced the Parameters.
        if names == self._names and all(type(tensor) is nn.Parameter for tensor in tensors):
            self._cache = names, tensors, weights
        return weights

    def _collect_weights(self) -> list[list[Weights]]:
        return [
            [self._weights_of(self._shapes(layer), suffix) for suffix in self._suffixes(layer)]
            for layer in range(self.num_layers)
        ]

    def _weights_of(self, shapes: Mapping[str, Shape], suffix: str) -> Weights:
        """Return the parameters of a layer and direction, in the order of the cell; kernels trust their shapes."""
        found: list[Tensor | None] = []
        device = self.weight.device
        for name in self.cell.parameter_names:
            value = getattr(self, f"{name}_{suffix}") if name in shapes else None
            if value is not None and (value.shape != torch.Size(shapes[name]) or value.device != device):
                raise ArgumentError(
                    f"The parameter {name}_{suffix} must have shape {list(shapes[name])}, on {device}; got "
                    f"{list(value.shape)} on {value.device}."
                )
            found.append(value)
        return self.cell.pack(found)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Without the selected backend, as others may be available in this process, and what is found again.
        super().__setstate__({name: value for name, value in state.items() if name not in ("_selection", "_cache")})
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

    def _places(self) -> Iterator[tuple[Mapping[str, Shape], str]]:
        """Yield the parameters, with their shapes, and the suffix of each layer and direction."""
        for layer in range(self.num_layers):
            shapes = self._shapes(layer)
            yield from ((shapes, suffix) for suffix in self._suffixes(layer))

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

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the layer of torch.nn with the same Parameters, which ``torch.jit.script`` compiles instead."""
        return plain_layer(self)

    def extra_repr(self) -> str:
        """Return the sizes and the arguments that differ from their defaults."""
        options = {
            "proj_size": (self.proj_size, 0),
            "num_layers": (self.num_layers, 1),
            "bias": (self.bias, True),
            "batch_first": (self.batch_first, False),
            "dropout": (self.dropout, 0.0),
            "bidirectional": (self.bidirectional, False),
        }
        changed = [f"{name}={value}" for name, (value, default) in options.items() if value != default]
        return ", ".join([str(self.input_size), str(self.hidden_size), *changed])

    @property
    def all_weights(self) -> list[list[nn.Parameter]]:
        """Parameters by layer and direction, as in ``torch.nn``."""
        return [[getattr(self, f"{name}_{suffix}") for name in shapes] for shapes, suffix in self._places()]

    def flatten_parameters(self) -> None:
        """Do nothing; exists for compatibility with ``torch.nn``."""


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
    if not isinstance(dropout, int | float) or isinstance(dropout, bool):  # pyright: ignore[reportUnnecessaryIsInstance] - users
        raise ArgumentTypeError(f"dropout must be a number, got {dropout!r}.")
    if not 0.0 <= dropout <= 1.0:
        raise ArgumentError(f"dropout must be a probability between 0 and 1, got {dropout}.")
