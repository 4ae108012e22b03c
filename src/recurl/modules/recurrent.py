"""LSTMModule and GRUModule: one recurrent module over TensorDicts, of which the two fix the cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NoReturn, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from recurl.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.keys import IS_INIT, TRAJ_IDS, NestedKey, next_key, normalize_key
from recurl.mode import recurrent_mode
from recurl.modules.python_rnn import GRU, LSTM, RecurrentNet
from recurl.recurrence import BACKENDS, Options, boundaries_of
from recurl.specs import Unbounded
from recurl.transforms import TensorDictPrimer


class RecurrentModule(TensorDictModuleBase):
    """What LSTMModule and GRUModule share: all but the cell, the state keys and the constructor.

    See :class:`LSTMModule` for what the modules read and write.
    """

    net_class: ClassVar[type[RecurrentNet]]
    child_name: ClassVar[str]
    default_state_keys: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        net: RecurrentNet,
        in_keys: list[NestedKey],
        out_keys: list[NestedKey],
        *,
        recurrent_backend: str,
        default_recurrent_mode: bool | None,
    ) -> None:
        super().__init__()
        BACKENDS.check_name(recurrent_backend)
        self.in_keys = in_keys  # pyright: ignore[reportAttributeAccessIssue] - tensordict annotates too narrow a key
        self.out_keys = out_keys  # pyright: ignore[reportAttributeAccessIssue] - likewise
        self.recurrent_backend = recurrent_backend
        self._default_recurrent_mode = bool(default_recurrent_mode)
        self.add_module(self.child_name, net)

    @property
    def net(self) -> RecurrentNet:
        """The network: the child module ``lstm`` or ``gru``."""
        net = self._modules[self.child_name]
        assert isinstance(net, RecurrentNet)
        return net

    @property
    def state_keys(self) -> list[NestedKey]:
        """Keys of the recurrent states that are read."""
        return self.in_keys[1:-1]

    @property
    def recurrent_mode(self) -> bool:
        """Whether whole sequences run now: the mode in force, or else the module's default."""
        mode = recurrent_mode()
        return self._default_recurrent_mode if mode is None else mode

    @recurrent_mode.setter
    def recurrent_mode(self, value: object) -> NoReturn:
        raise UsageError(
            "recurrent_mode can't be assigned. Use the context manager recurl.modules.set_recurrent_mode, "
            "or the argument default_recurrent_mode."
        )

    def set_recurrent_mode(self, mode: object = None) -> NoReturn:
        """Raise: the mode belongs to a block of code, not to a module."""
        raise UsageError(
            "module.set_recurrent_mode() doesn't exist: the mode belongs to a block of code, not to a module. "
            "Write: with recurl.modules.set_recurrent_mode(True): ..."
        )

    def forward(
        self, tensordict: TensorDictBase | Tensor | None = None, *tensors: Tensor, **named: Tensor
    ) -> TensorDictBase | tuple[Tensor, ...]:
        """Run one step, or in recurrent mode whole sequences.

        Args:
            tensordict: read and written in place; or the first of the inputs as tensors, in the order of ``in_keys``.
            *tensors: the other inputs.
            **named: inputs by name; the parts of a nested key are joined by ``_``.

        Returns:
            ``tensordict``, or for tensors the outputs in the order of ``out_keys``.
        """
        if not isinstance(tensordict, TensorDictBase):
            first = () if tensordict is None else (tensordict,)
            tensordict = self._gather((*first, *tensors), named)
            self.forward(tensordict)
            return tuple(tensordict.get(key) for key in self.out_keys)
        features, states = self._sequence(tensordict) if self.recurrent_mode else self._step(tensordict)
        tensordict.set(self.out_keys[0], features)
        for key, state in zip(self.out_keys[1:], states, strict=True):
            tensordict.set(key, state)
        return tensordict

    def _gather(self, tensors: tuple[Tensor, ...], named: dict[str, Tensor]) -> TensorDictBase:
        """Put inputs that came as tensors into a TensorDict; its batch size is that of the value."""
        names = ["_".join(key) if isinstance(key, tuple) else key for key in self.in_keys]
        given = dict(zip(names, tensors, strict=False))
        if len(tensors) > len(names) or given.keys() & named.keys() or not named.keys() <= set(names):
            raise ArgumentTypeError(
                f"Pass a TensorDict, or each of the tensors {', '.join(names)} once; "
                f"got {len(tensors)} by position and by name {', '.join(named) or 'none'}."
            )
        given |= named
        if names[0] not in given:
            raise MissingKeyError(f"The input {names[0]!r} is missing; got {', '.join(given) or 'nothing'}.")
        batch = given[names[0]].shape[:-1]
        return TensorDict({key: given[n] for key, n in zip(self.in_keys, names, strict=True) if n in given}, batch)

    def _options(self) -> Options:
        return Options()

    def _step(self, tensordict: TensorDictBase) -> tuple[Tensor, list[Tensor]]:
        net, batch = self.net, tensordict.batch_size
        if net.bidirectional:
            raise UsageError(
                "A bidirectional module can't run step by step: its reverse direction starts at the end of a sequence. "
                "Run it on whole sequences, inside set_recurrent_mode(True)."
            )
        x = self._value(tensordict).reshape(batch.numel(), net.input_size)
        is_init = _flags(tensordict, batch).reshape(batch.numel(), 1, 1)
        stored = self._states(tensordict)
        if stored is None:
            shape = (x.shape[0], net.num_layers)
            states = tuple(torch.zeros(*shape, size, dtype=x.dtype, device=x.device) for size in net.state_sizes)
        else:
            states = tuple(torch.where(is_init, 0, state) for state in stored)
        features, after = net.step(x, states)
        return self._unflatten(batch, features, after)

    def _sequence(self, tensordict: TensorDictBase) -> tuple[Tensor, list[Tensor]]:
        batch = tensordict.batch_size
        if len(batch) == 0:
            raise ArgumentError(
                "In recurrent mode the last batch dimension is time: the TensorDict must have batch size [T] or "
                "[*B, T], got []. To run a single step leave recurrent mode: set_recurrent_mode(False)."
            )
        x = self._value(tensordict).reshape(batch.numel(), self.net.input_size)
        boundaries = boundaries_of(_flags(tensordict, batch), tensordict.get(TRAJ_IDS, None), batch)
        features, after = self.net.run(x, self._states(tensordict), boundaries, self.recurrent_backend, self._options())
        return self._unflatten(batch, features, after)

    @staticmethod
    def _unflatten(batch: torch.Size, features: Tensor, after: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        return features.reshape(*batch, features.shape[-1]), [
            state.reshape(*batch, *state.shape[1:]) for state in after
        ]

    def _value(self, tensordict: TensorDictBase) -> Tensor:
        key, net = self.in_keys[0], self.net
        value = tensordict.get(key, None)
        if value is None:
            raise MissingKeyError(f"The input {key!r} is missing; the TensorDict holds {_names(tensordict)}.")
        expected = torch.Size([*tensordict.batch_size, net.input_size])
        if value.shape != expected:
            raise ArgumentError(
                f"The input {key!r} must have the batch size and then input_size: {list(expected)}, "
                f"got {list(value.shape)}."
            )
        if value.dtype != net.dtype or value.device != net.device:
            return self._convert(key, value)
        return value

    def _convert(self, key: NestedKey, value: Tensor) -> Tensor:
        net = self.net
        if value.device != net.device:
            raise UsageError(
                f"The input {key!r} is on {value.device} but the module on {net.device}: move one of them with .to()."
            )
        if torch.is_autocast_enabled(value.device.type) and value.is_floating_point():
            return value.to(net.dtype)  # the recurrence keeps its own precision under autocast
        raise UsageError(
            f"The input {key!r} has dtype {value.dtype} but the module {net.dtype}: convert one of them with .to()."
        )

    def _states(self, tensordict: TensorDictBase) -> tuple[Tensor, ...] | None:
        """Stored states as ``[prod(batch), L * D, size]``, or None if all are absent."""
        net, batch = self.net, tensordict.batch_size
        states = [tensordict.get(key, None) for key in self.state_keys]
        if all(state is None for state in states):
            return None
        slots = net.num_layers * net.num_directions
        for key, state, size in zip(self.state_keys, states, net.state_sizes, strict=True):
            if state is None:
                raise UsageError(
                    f"The state {key!r} is missing though another of {self.state_keys} is there: give all or none."
                )
            expected = torch.Size([*batch, slots, size])
            if state.shape != expected or state.dtype != net.dtype:
                raise UsageError(
                    f"The state {key!r} must have shape {list(expected)} (batch, layers x directions, size) and dtype "
                    f"{net.dtype}, got {list(state.shape)} and {state.dtype}. make_tensordict_primer() declares it."
                )
        return tuple(state.reshape(batch.numel(), *state.shape[-2:]) for state in states if state is not None)

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform that gives an environment this module's recurrent states, zero at resets.

        Raises:
            UsageError: an out key isn't ``("next", in_key)``, so that the state would never be fed back.

        Example:
            >>> from recurl.envs import GymEnv, InitTracker, TransformedEnv
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
        return TensorDictPrimer(
            {
                key: Unbounded(shape=(slots, size), dtype=net.dtype)
                for key, size in zip(self.state_keys, net.state_sizes, strict=True)
            }
        )


def _flags(tensordict: TensorDictBase, batch: torch.Size) -> Tensor:
    is_init = tensordict.get(IS_INIT, None)
    if is_init is None:
        raise MissingKeyError(
            "The entry 'is_init' is missing: a recurrent module must know where episodes begin. Append "
            f"recurl.envs.InitTracker() to the environment. The TensorDict holds {_names(tensordict)}."
        )
    if is_init.dtype not in (torch.bool, torch.uint8):
        raise UsageError(f"is_init must be boolean, got {is_init.dtype}. Convert it: is_init.bool().")
    if is_init.shape not in (batch, torch.Size([*batch, 1])):
        raise ArgumentError(
            f"is_init must have the batch size {list(batch)}, with or without a trailing 1; got {list(is_init.shape)}."
        )
    return is_init if is_init.dtype == torch.bool else is_init.bool()


def _names(tensordict: TensorDictBase) -> str:
    return ", ".join(sorted(str(key) for key in cast(Iterable[object], tensordict.keys()))) or "nothing"


class LSTMModule(RecurrentModule):
    """An LSTM that steps in an environment and replays whole sequences, reset by ``is_init``.

    By default it runs **one step**: it reads a value ``[*B, I]``, ``is_init`` (bool ``[*B, 1]`` or ``[*B]``) and the
    states h ``[*B, L, P or H]`` and c ``[*B, L, H]``, and writes features ``[*B, P or H]`` and the next states.
    Where ``is_init`` is true the incoming state counts as zero.

    Inside :class:`~recurl.modules.set_recurrent_mode` it runs **sequences** along the last batch dimension:
    ``[*B, T, ...]``, where ``[T]`` may be a stream of concatenated slices. Rows, true ``is_init`` and, when
    ``("collector", "traj_ids")`` is there, changes of trajectory start a segment; a segment runs from the state
    stored at its first token. The next states are those after every token (``"pad"``: at segment ends only).

    Missing states (all of them) count as zeros. I is ``input_size``, H ``hidden_size``, P ``proj_size``, L
    ``num_layers`` (times two when bidirectional, which can only run sequences).

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L; each layer feeds the next.
        bias: add biases.
        batch_first: must be True; there for the sake of ``torch.nn``'s signature.
        dropout: probability of dropping each output of each layer but the last, in training.
        proj_size: P; when positive, h is projected to P units.
        bidirectional: also run each segment from its end to its start.
        recurrent_backend: who runs sequences: ``"pad"`` (torch.nn's kernels), ``"loop"`` (a step loop with fast
            resets), ``"reference"`` (slow and obvious), ``"auto"``, ``"fastest"``.
        in_key: key of the value; the states get the keys ``"recurrent_state_h"`` and ``"recurrent_state_c"``.
        in_keys: keys of value, h and c; ``"is_init"`` may follow. Exclusive with ``in_key``.
        out_key: key of the features; the states go to ``("next", "recurrent_state_h")`` and ``_c``.
        out_keys: keys of features, h and c. Exclusive with ``out_key``.
        device: device of the parameters.
        dtype: dtype of the parameters.
        lstm: a ``torch.nn.LSTM`` (``batch_first=True``) that gives its Parameters; exclusive with all sizes.
        default_recurrent_mode: the mode where none is set; False if not given.

    Raises:
        ArgumentError: a value is out of range, key arguments are missing, doubled or too many.
        ArgumentTypeError: an argument has the wrong type.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from recurl.modules import set_recurrent_mode
        >>> lstm = LSTMModule(4, 8, in_key="observation", out_key="features")
        >>> is_init = torch.tensor([[True, False, False], [True, False, True]])
        >>> batch = TensorDict({"observation": torch.randn(2, 3, 4), "is_init": is_init}, [2, 3])
        >>> with set_recurrent_mode("recurrent"):
        ...     batch = lstm(batch)
        >>> batch["features"].shape, batch["next", "recurrent_state_h"].shape
        (torch.Size([2, 3, 8]), torch.Size([2, 3, 1, 8]))
    """

    net_class = LSTM
    child_name = "lstm"
    default_state_keys = ("recurrent_state_h", "recurrent_state_c")

    def __init__(  # noqa: PLR0913 - the signature is the field's
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        proj_size: int = 0,
        bidirectional: bool = False,
        recurrent_backend: str = "pad",
        *,
        in_key: NestedKey | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        lstm: nn.LSTM | None = None,
        default_recurrent_mode: bool | None = None,
    ) -> None:
        options = {
            "num_layers": num_layers,
            "bias": bias,
            "batch_first": batch_first,
            "dropout": dropout,
            "proj_size": proj_size,
            "bidirectional": bidirectional,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(
            _build_net(LSTM, nn.LSTM, input_size, hidden_size, options, lstm),
            _in_keys(self.default_state_keys, in_key, in_keys),
            _out_keys(self.default_state_keys, out_key, out_keys),
            recurrent_backend=recurrent_backend,
            default_recurrent_mode=default_recurrent_mode,
        )


class GRUModule(RecurrentModule):
    """A GRU that steps in an environment and replays whole sequences, reset by ``is_init``.

    All is as in :class:`LSTMModule`, with one state ``[*B, L, H]`` instead of two and no projection.

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: L; each layer feeds the next.
        bias: add biases.
        batch_first: must be True; there for the sake of ``torch.nn``'s signature.
        dropout: probability of dropping each output of each layer but the last, in training.
        bidirectional: also run each segment from its end to its start.
        recurrent_backend: as in :class:`LSTMModule`.
        in_key: key of the value; the state gets the key ``"recurrent_state"``.
        in_keys: keys of value and state; ``"is_init"`` may follow. Exclusive with ``in_key``.
        out_key: key of the features; the state goes to ``("next", "recurrent_state")``.
        out_keys: keys of features and state. Exclusive with ``out_key``.
        device: device of the parameters.
        dtype: dtype of the parameters.
        gru: a ``torch.nn.GRU`` (``batch_first=True``) that gives its Parameters; exclusive with all sizes.
        default_recurrent_mode: the mode where none is set; False if not given.

    Raises:
        ArgumentError: a value is out of range, key arguments are missing, doubled or too many.
        ArgumentTypeError: an argument has the wrong type.

    Example:
        >>> import torch
        >>> gru = GRUModule(4, 8, in_keys=["observation", "rs"], out_keys=["features", ("next", "rs")])
        >>> features, state = gru(observation=torch.randn(3, 4), is_init=torch.ones(3, 1, dtype=torch.bool))
        >>> features.shape, state.shape
        (torch.Size([3, 8]), torch.Size([3, 1, 8]))
    """

    net_class = GRU
    child_name = "gru"
    default_state_keys = ("recurrent_state",)

    def __init__(  # noqa: PLR0913 - the signature is the field's
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        recurrent_backend: str = "pad",
        *,
        in_key: NestedKey | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_key: NestedKey | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        gru: nn.GRU | None = None,
        default_recurrent_mode: bool | None = None,
    ) -> None:
        options = {
            "num_layers": num_layers,
            "bias": bias,
            "batch_first": batch_first,
            "dropout": dropout,
            "bidirectional": bidirectional,
            "device": device,
            "dtype": dtype,
        }
        super().__init__(
            _build_net(GRU, nn.GRU, input_size, hidden_size, options, gru),
            _in_keys(self.default_state_keys, in_key, in_keys),
            _out_keys(self.default_state_keys, out_key, out_keys),
            recurrent_backend=recurrent_backend,
            default_recurrent_mode=default_recurrent_mode,
        )


_DEFAULTS = {
    "num_layers": 1,
    "bias": True,
    "batch_first": True,
    "dropout": 0.0,
    "proj_size": 0,
    "bidirectional": False,
    "device": None,
    "dtype": None,
}


def _build_net(
    net_class: type[RecurrentNet],
    torch_class: type[nn.RNNBase],
    input_size: int | None,
    hidden_size: int | None,
    options: Mapping[str, object],
    wrapped: nn.RNNBase | None,
) -> RecurrentNet:
    name = torch_class.__name__
    if wrapped is None:
        if not options["batch_first"]:
            raise ArgumentError(f"batch_first must be True: {name}Module keeps time after the batch dimensions.")
        if input_size is None:
            raise ArgumentTypeError(f"input_size is missing: give the sizes or a torch.nn.{name} to wrap.")
        if hidden_size is None:
            raise ArgumentError(f"hidden_size is missing: give the sizes or a torch.nn.{name} to wrap.")
        return net_class(input_size, hidden_size, **options)  # pyright: ignore[reportArgumentType] - checked there
    if not isinstance(wrapped, torch_class):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass the other cell
        raise ArgumentTypeError(f"The wrapped module must be a torch.nn.{name}, got {type(wrapped).__name__}.")
    given = {key for key, value in options.items() if value != _DEFAULTS[key]}
    given |= {key for key, value in (("input_size", input_size), ("hidden_size", hidden_size)) if value is not None}
    if given:
        raise ArgumentError(
            f"A wrapped torch.nn.{name} brings its own sizes and options: remove {', '.join(sorted(given))}."
        )
    if not wrapped.batch_first:
        raise ArgumentError(f"The wrapped torch.nn.{name} must have batch_first=True.")
    sizes = {key: getattr(wrapped, key) for key in options if key not in ("device", "dtype")}
    net = net_class(wrapped.input_size, wrapped.hidden_size, **sizes, device="meta")
    net.adopt(wrapped)
    return net


def _in_keys(states: Sequence[str], key: NestedKey | None, keys: Sequence[NestedKey] | None) -> list[NestedKey]:
    parsed = _parse_keys("in", states, key, keys)
    count = 1 + len(states)
    if len(parsed) == count:
        return [*parsed, IS_INIT]
    if len(parsed) == count + 1 and parsed[-1] == IS_INIT:
        return parsed
    raise ArgumentError(
        f"in_keys must be {count} keys (value, {', '.join(states)}), and 'is_init' may follow as the last; "
        f"got {parsed}. The name 'is_init' can't be changed or nested."
    )


def _out_keys(states: Sequence[str], key: NestedKey | None, keys: Sequence[NestedKey] | None) -> list[NestedKey]:
    parsed = _parse_keys("out", [("next", state) for state in states], key, keys)
    if len(parsed) != 1 + len(states):
        raise ArgumentError(f"out_keys must be {1 + len(states)} keys (features, {', '.join(states)}), got {parsed}.")
    return parsed


def _parse_keys(
    side: str, states: Sequence[NestedKey], key: NestedKey | None, keys: Sequence[NestedKey] | None
) -> list[NestedKey]:
    if (key is None) == (keys is None):
        given = "neither" if key is None else "both"
        raise ArgumentError(f"Give exactly one of {side}_key and {side}_keys ({side}_keys names all), got {given}.")
    if keys is None:
        return [normalize_key(key), *states]
    if isinstance(keys, str):
        raise ArgumentTypeError(f"{side}_keys must be a list of keys, got the string {keys!r}; use {side}_key for one.")
    return [normalize_key(item) for item in keys]
