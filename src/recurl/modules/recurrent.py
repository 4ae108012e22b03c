"""Base class of recurrent modules over TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.devices import is_autocast_on
from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.core.keys import NestedKey, next_key
from recurl.core.precision import resolve_precision
from recurl.core.specs import Unbounded
from recurl.core.torch_compat import children_of, is_compiling
from recurl.modules.rnn_arguments import RecurrentSettings
from recurl.modules.rnn_inputs import entry_names, flags_in, flat, signature
from recurl.nn.recurrent_net import RecurrentNet
from recurl.recurrence import BACKENDS, DEFAULT_OPTIONS, Options
from recurl.sequences.entries import Entries, takes_entries
from recurl.sequences.index import SequenceIndex
from recurl.sequences.mode import recurrent_mode
from recurl.sequences.start_states import check_cut, state_in
from recurl.sequences.stored import stored_everywhere
from recurl.transforms import TensorDictPrimer


class RecurrentModule(TensorDictModuleBase):
    """Base class of LSTMModule, GRUModule and CellModule (the base of all others), which add constructors.

    See :class:`~recurl.modules.LSTMModule` for the entries read and written.
    """

    primer_type: Callable[..., Any] = TensorDictPrimer  # creates the primer from specs by key

    def __init__(
        self,
        net: RecurrentNet,
        in_keys: list[NestedKey],
        out_keys: list[NestedKey],
        settings: RecurrentSettings,
        default_recurrent_mode: bool | None,
    ) -> None:
        super().__init__()
        self.in_keys = in_keys  # pyright: ignore[reportAttributeAccessIssue] - tensordict annotates too narrow a key
        self.out_keys = out_keys  # pyright: ignore[reportAttributeAccessIssue] - likewise
        self.recurrent_backend = settings.backend
        self.recurrent_compute_dtype = settings.compute_dtype
        self.recurrent_recompute = settings.recompute
        self.recurrent_matmul_precision = settings.matmul_precision
        if default_recurrent_mode not in (None, False, True):
            raise ArgumentTypeError(
                f"default_recurrent_mode must be True, False or None, got {default_recurrent_mode!r}."
            )
        self._default_recurrent_mode = bool(default_recurrent_mode)
        BACKENDS.check_cell(settings.backend, net.cell)
        self.child_name = net.cell.child_name
        self.add_module(self.child_name, net)
        self._checked: tuple[Any, ...] = ()

    @property
    def net(self) -> RecurrentNet:
        """The network: the child module ``lstm``, ``gru``, or ``cell`` for any other cell."""
        net = children_of(self)[self.child_name]
        assert isinstance(net, RecurrentNet)
        return net

    @property
    def state_keys(self) -> list[NestedKey]:
        """Keys of the recurrent states that are read."""
        return self.in_keys[1:-1]

    @property
    def recurrent_mode(self) -> bool:
        """Whether the module currently runs whole sequences: the active mode, or the module's default."""
        mode = recurrent_mode()
        return self._default_recurrent_mode if mode is None else mode

    @recurrent_mode.setter
    def recurrent_mode(self, value: object) -> NoReturn:
        raise UsageError(
            "recurrent_mode can't be assigned. Use the context manager recurl.modules.set_recurrent_mode, "
            "or the argument default_recurrent_mode."
        )

    def set_recurrent_mode(self, mode: object = None) -> NoReturn:
        """Raise UsageError: the mode belongs to a block of code, not to a module."""
        raise UsageError(
            "module.set_recurrent_mode() doesn't exist: the mode belongs to a block of code, not to a module. "
            "Write: with recurl.modules.set_recurrent_mode(True): ..."
        )

    @takes_entries
    def forward(
        self, tensordict: TensorDictBase | Tensor | None = None, *tensors: Tensor, **named: Tensor
    ) -> TensorDictBase | tuple[Tensor, ...]:
        """Run one step, or in recurrent mode whole sequences.

        Args:
            tensordict: TensorDict that is read and written in place; or the first input tensor, in the order of
                ``in_keys``.
            *tensors: the other input tensors.
            **named: inputs by name; the parts of a nested key are joined by ``_``.

        Returns:
            ``tensordict``, or for tensors the outputs in the order of ``out_keys``.
        """
        if getattr(tensordict, "is_locked", False):
            raise UsageError(
                f"A module writes its outputs {self.out_keys} into the TensorDict, but this one is locked: unlock it "
                "with .unlock_(), or pass a shallow copy, .copy()."
            )
        if not isinstance(tensordict, Entries | TensorDictBase):
            first = () if tensordict is None else (tensordict,)
            tensordict = self._gather((*first, *tensors), named)
            self.forward(tensordict)
            return tuple(tensordict.get(key) for key in self.out_keys)
        features, states = self._sequence(tensordict) if self.recurrent_mode else self._step(tensordict)
        tensordict.set(self.out_keys[0], features)
        for key, state in zip(self.out_keys[1:], states, strict=bool(states)):
            tensordict.set(key, state)
        return tensordict

    def sequences(self, tensordict: TensorDictBase) -> tuple[SequenceIndex, dict[NestedKey, Tensor]]:
        """Return the index and the checked states of a batch of sequences; no states if all are absent.

        Args:
            tensordict: ``[T]`` or ``[*B, T]``.

        Returns:
            The index, and the states at every step, ``[*B, T, L * D, *shape]``, zero where none is stored.
        """
        batch = tensordict.batch_size
        flags_in(tensordict, batch)
        index = SequenceIndex.of(tensordict)
        check_cut(tensordict, self.state_keys, index)
        flat_states = (state.flatten(0, len(batch) - 1) for state in self._states(tensordict))
        dense = (stored_everywhere(state, batch.numel()).unflatten(0, batch) for state in flat_states)
        return index, dict(zip(self.state_keys, dense, strict=False))

    def _gather(self, tensors: tuple[Tensor, ...], named: dict[str, Tensor]) -> TensorDictBase:
        """Collect input tensors in a TensorDict with the batch size of the first input."""
        names = ["_".join(key) if isinstance(key, tuple) else key for key in self.in_keys]
        given = dict(zip(names, tensors, strict=False))
        if len(tensors) > len(names) or given.keys() & named.keys() or not named.keys() <= set(names):
            raise ArgumentTypeError(
                f"Pass a TensorDict, or each of the tensors {', '.join(names)} once; "
                f"got {len(tensors)} by position, and by name {', '.join(named) or 'none'}."
            )
        given |= named
        if names[0] not in given:
            raise MissingKeyError(f"The input {names[0]!r} is missing; got {', '.join(given) or 'nothing'}.")
        batch = given[names[0]].shape[:-1]
        return TensorDict({key: given[n] for key, n in zip(self.in_keys, names, strict=True) if n in given}, batch)

    def _options(self, device: torch.device) -> Options:
        precision = resolve_precision(self.recurrent_matmul_precision, device) if device.type == "cuda" else "ieee"
        return Options(self.recurrent_recompute == "full", precision, self.recurrent_compute_dtype)

    def _step(self, tensordict: TensorDictBase) -> tuple[Tensor, tuple[Tensor, ...]]:
        net, batch = self.net, tensordict.batch_size
        if net.bidirectional:
            raise UsageError(
                "A bidirectional module can't run step by step: its reverse direction starts at the end of a sequence. "
                "Run it on whole sequences, inside set_recurrent_mode(True)."
            )
        x, is_init, *stored = self._inputs(tensordict)
        states = tuple(flat(state, batch) for state in stored) or None
        options = self._options(x.device) if x.is_cuda else DEFAULT_OPTIONS
        features, after = net.step(flat(x, batch), states, flat(is_init, batch), options)
        if len(batch) == 1:
            return features, after
        return features.reshape(*batch, features.shape[-1]), tuple(
            state.reshape(*batch, *state.shape[1:]) for state in after
        )

    def _sequence(self, tensordict: TensorDictBase) -> tuple[Tensor, tuple[Tensor, ...]]:
        batch = tensordict.batch_size
        if len(batch) == 0:
            raise ArgumentError(
                "In recurrent mode the last batch dimension is time: the TensorDict must have batch size [T] or "
                "[*B, T], got []. To run a single step leave recurrent mode: set_recurrent_mode(False)."
            )
        x, _, *stored = self._inputs(tensordict)
        index = SequenceIndex.of(tensordict)
        check_cut(tensordict, self.state_keys, index)
        options, unread = self._options(x.device), getattr(tensordict, "unread", ())
        if unread and all(key in unread for key in self.out_keys[1:]):
            options = options._replace(after=False)
        return self.net.run(x, tuple(stored) or None, index, self.recurrent_backend, options)

    def _inputs(self, tensordict: TensorDictBase) -> tuple[Tensor, ...]:
        """Return (value, is_init, *states), checked; no states if all are absent."""
        if is_compiling():  # tracing would guard on the stored signature
            return self._checked_inputs(tensordict)
        values = [tensordict.get(key, None) for key in self.in_keys]
        weight = self.net.weight
        # Inputs like those checked last aren't checked again: a step is too short for full checks every time.
        signatures = (weight.dtype, weight.device, tensordict.batch_size, [signature(value) for value in values])
        if signatures == self._checked:
            x, *states, is_init = values
            return (x, is_init, *states)
        x, is_init, *states = inputs = self._checked_inputs(tensordict)
        if x is values[0] and is_init is values[-1] and states:
            self._checked = signatures
        return inputs

    def _checked_inputs(self, tensordict: TensorDictBase) -> tuple[Tensor, ...]:
        x, is_init = self._value(tensordict), flags_in(tensordict, tensordict.batch_size)
        return (x, is_init, *self._states(tensordict))

    def _value(self, tensordict: TensorDictBase) -> Tensor:
        key, net = self.in_keys[0], self.net
        value = tensordict.get(key, None)
        if value is None:
            raise MissingKeyError(
                f"The input {key!r} is missing; the TensorDict holds {entry_names(tensordict)}. Name the entry to read "
                "with in_key=, or as the first one of in_keys=."
            )
        expected = torch.Size([*tensordict.batch_size, net.input_size])
        if value.shape != expected:
            _check_no_agents(key, value, tensordict.batch_size, net.input_size)
            raise ArgumentError(
                f"The input {key!r} must have the batch size followed by input_size: {list(expected)}, "
                f"got {list(value.shape)}. Change the input_size of the module or the batch_size of the TensorDict, or "
                "reshape the entry."
            )
        weight = net.weight
        if value.dtype != weight.dtype or value.device != weight.device:
            return self._convert(key, value)
        return value

    def _convert(self, key: NestedKey, value: Tensor) -> Tensor:
        net = self.net
        if value.device != net.device:
            raise UsageError(
                f"The input {key!r} is on {value.device} but the module on {net.device}: move one of them with .to()."
            )
        if is_autocast_on(value.device) and value.is_floating_point():
            return value.to(net.dtype)  # the recurrence keeps its own precision under autocast
        raise UsageError(
            f"The input {key!r} has dtype {value.dtype} but the module {net.dtype}: convert one of them with .to()."
        )

    def _states(self, tensordict: TensorDictBase) -> tuple[Tensor, ...]:
        """Return the stored states, as :func:`~recurl.recurrence.run_stack` takes them; ``()`` if all are absent."""
        net, batch = self.net, tensordict.batch_size
        slots, dtype = net.num_layers * net.num_directions, net.dtype
        keys = zip(self.state_keys, net.state_shapes, strict=True)
        states = [state_in(tensordict, key, (slots, *shape), sequences=self.recurrent_mode) for key, shape in keys]
        if all(state is None for state in states):
            return ()
        for key, state, shape in zip(self.state_keys, states, net.state_shapes, strict=True):
            if state is None:
                raise UsageError(
                    f"The state {key!r} is missing, but another one of {self.state_keys} is present: give all or none."
                )
            stored = batch if isinstance(tensordict.get(key), Tensor) else state.shape[: len(batch)]
            expected = (*stored, slots, *shape)
            if state.shape != expected or state.dtype != dtype:
                raise UsageError(
                    f"The state {key!r} must have shape {list(expected)} (batch, layers x directions, size) and "
                    f"dtype {dtype}, got {list(state.shape)} and {state.dtype}. make_tensordict_primer() declares it."
                )
        return tuple(state for state in states if state is not None)

    def make_python_based(self) -> Self:
        """Switch to plain torch operations, with the same Parameters, and return self.

        Raises:
            UnsupportedError: the module is bidirectional.
        """
        self.net.set_python_based(True)
        return self

    def make_cudnn_based(self) -> Self:
        """Switch to torch.nn's kernels (if the backend is ``"pad"``), with the same Parameters, and return self.

        Raises:
            UnsupportedError: the module is bidirectional.
        """
        self.net.set_python_based(False)
        return self

    @property
    def canonical_keys(self) -> list[NestedKey]:
        """All keys read or written: ``in_keys`` followed by ``out_keys``."""
        return [*self.in_keys, *self.out_keys]

    def canonicalize(self, tensordict: TensorDictBase, inplace: bool = False) -> TensorDictBase:
        """Make the entries that this module reads or writes contiguous; see :func:`canonicalize_rnn_subset`."""
        return canonicalize_rnn_subset(tensordict, [self], inplace)

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform that adds this module's recurrent states to an environment, zero at resets.

        Raises:
            UsageError: an out key isn't ``("next", in_key)``, so the state would never be fed back.

        Example:
            >>> from recurl.envs import GymEnv, InitTracker, TransformedEnv
            >>> from recurl.modules import GRUModule
            >>> gru = GRUModule(4, 8, in_keys=["observation", "rs"], out_keys=["features", ("next", "rs")])
            >>> env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
            >>> env = env.append_transform(gru.make_tensordict_primer())
            >>> env.reset()["rs"].shape
            torch.Size([1, 8])
        """
        net = self.net
        for key, out_key in zip(self.state_keys, self.out_keys[1:], strict=True):
            if out_key != next_key(key):
                raise UsageError(
                    f"The state {key!r} is written to {out_key!r} and would never be fed back: "
                    f"use the out key {next_key(key)!r}."
                )
        slots = net.num_layers * net.num_directions
        return self.primer_type(
            {
                key: Unbounded(shape=(slots, *shape), dtype=net.dtype)
                for key, shape in zip(self.state_keys, net.state_shapes, strict=True)
            }
        )


def _check_no_agents(key: NestedKey, value: Tensor, batch: torch.Size, size: int) -> None:
    """Raise if a nested input has a dimension between those of the batch and of its features, as a group of agents."""
    lead = len(batch)
    if isinstance(key, tuple) and value.ndim == lead + 2 and value.shape[:lead] == batch and value.shape[-1] == size:
        called = "" if key[0] == "agents" else f", group={key[0]!r}"
        raise ArgumentError(
            f"The input {key!r} has shape {list(value.shape)}, with a dimension of {value.shape[lead]} after the batch "
            f"size {list(batch)}. If these are agents, each with its own state, make every agent a row: name single "
            f"agents' keys ({key[-1]!r}) and wrap the module, recurl.modules.AgentsAsRows(module, n_agents="
            f"{value.shape[lead]}{called}); or convert the batch, recurl.data.agents_as_rows(tensordict{called}); or "
            "use an environment of recurl (MultiAgentEnv, VmasEnv, PettingZooEnv)."
        )


def canonicalize_rnn_subset(
    tensordict: TensorDictBase, modules: Iterable[RecurrentModule], inplace: bool = False
) -> TensorDictBase:
    """Make the entries that ``modules`` read or write contiguous (row-major), as compiled kernels prefer.

    Other entries and absent keys are ignored.

    Args:
        tensordict: a batch.
        modules: modules whose ``canonical_keys`` are made contiguous.
        inplace: modify ``tensordict`` instead of a shallow copy.

    Returns:
        The shallow copy; ``tensordict`` itself if ``inplace``, or if it has none of the keys.

    Example:
        >>> from tensordict import TensorDict
        >>> from recurl.modules import GRUModule
        >>> gru = GRUModule(4, 8, in_key="observation", out_key="features")
        >>> batch = TensorDict({"observation": torch.zeros(4, 3).t()}, [3])
        >>> gru.canonicalize(batch)["observation"].is_contiguous(), batch["observation"].is_contiguous()
        (True, False)
    """
    keys = dict.fromkeys(key for module in modules for key in module.canonical_keys)
    present = {key: value for key in keys if (value := tensordict.get(key, None)) is not None}
    if not present:
        return tensordict
    result = tensordict if inplace else tensordict.copy()
    for key, value in present.items():
        result.set(key, value.contiguous())
    return result
