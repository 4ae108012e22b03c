"""Sequences of a batch, and network outputs along them and one step past their ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.keys import IS_INIT, LAST_STEP, MASK, TRAJ_IDS, TRAJ_STEPS, NestedKey, next_key, normalize_key
from recurl.core.torch_compat import is_compiling
from recurl.execution.lowering import Network, inputs_from, inputs_of
from recurl.objectives.common import check_writes, entry, per_token, states_of
from recurl.objectives.tensor_keys import TensorKeys
from recurl.sequences.continuity import check_order, check_starts
from recurl.sequences.entries import Step
from recurl.sequences.index import SequenceIndex
from recurl.sequences.mode import set_recurrent_mode

__all__ = [
    "SequenceNetwork",
    "Sequences",
    "Unroll",
    "bootstraps_at_ends_only",
    "external_inputs",
    "gather_tokens",
    "inputs_in_sequence",
]

_FROM_ENV = "Collect it with an environment of recurl, which writes it under 'next' at every step."
_GATHERED_ON = ("cpu",)  # devices on which counting the ends of sequences needs no synchronization


class Sequences(NamedTuple):
    """Sequences of a batch, and per-token tensors ``[*B, T]``.

    Attributes:
        segments: the sequence index.
        reward: reward of the step.
        terminated: bool, True where the step ended its episode: nothing is bootstrapped.
        ends: bool, True where the next token doesn't continue this one.
        mask: bool, False at padding; None if there is none.
        last: flat indices of the tokens that a bootstrap step follows, if their number is known; None otherwise.
    """

    segments: SequenceIndex
    reward: Tensor
    terminated: Tensor
    ends: Tensor
    mask: Tensor | None
    last: Tensor | None = None

    @property
    def flat_mask(self) -> Tensor | None:
        """The mask, flat ``[N]``."""
        return None if self.mask is None else self.mask.reshape(-1)

    @classmethod
    def read(cls, batch: Step, keys: TensorKeys) -> Sequences:
        """Read the sequences of a batch ``[T]`` or ``[*B, T]``, time last.

        A sequence ends at the end of a row, at ``done``, before ``is_init``, where the next token isn't the
        trajectory's next step, and where the mask changes.

        Raises:
            ArgumentError: the batch has no time dimension, or time is not its last; an entry has another shape, or a
                flag is not bool.
            MissingKeyError: reward or a done flag is missing.
            UsageError: the tokens are out of order; see :func:`~recurl.sequences.continuity.check_order`.
        """
        _check_time(batch)
        shape = batch.batch_size
        reward, done, terminated = (per_token(key, entry(batch, key, _FROM_ENV), shape) for key in keys.of_sequences)
        for key, flags in zip(keys.of_sequences[1:], (done, terminated), strict=True):
            if flags.dtype != torch.bool:
                raise ArgumentError(
                    f"The entry {key!r} must be bool, got {flags.dtype}. Convert it: batch[{key!r}] != 0."
                )
        mask = batch.get(MASK, None)
        mask = None if mask is None else per_token(MASK, cast(Tensor, mask), shape)
        index = SequenceIndex.of(batch, done=done | terminated, mask=mask)
        check_order(batch, index.starts)
        last = batch.get(LAST_STEP, None)
        last = None if last is None else last[..., 0].reshape(-1)
        return cls(index, reward, terminated, index.ends.reshape(shape), mask, last)


class SequenceNetwork:
    """Modules that run along sequences and one step past their ends.

    Args:
        modules: the modules in order, from observations to outputs, recurrent or not.
        extra_keys: further observations to read.

    Attributes:
        network: the modules.
        states: keys of the recurrent states of the modules.
        in_keys: entries of a batch that are read, except reward and flags.
    """

    def __init__(self, modules: Sequence[TensorDictModuleBase], extra_keys: Iterable[NestedKey] = ()) -> None:
        self.network = Network(modules)
        self._keys = external_inputs(modules)
        self.states = states_of(*modules)
        observed = [key for key in self._keys if key != IS_INIT and key not in self.states]
        self._observed = list(dict.fromkeys([*observed, *extra_keys]))
        self.in_keys: list[NestedKey] = [*dict.fromkeys([*self._keys, *extra_keys]), *map(next_key, self._observed)]

    def inputs(self, batch: Step, sequences: Sequences) -> Step:
        """Return the inputs of the modules along the sequences.

        Raises:
            MissingKeyError: an observation has no counterpart under ``"next"``, or a sequence begins inside an episode
                without a stored state to start from.
        """
        self.check(batch, sequences)
        return inputs_in_sequence(batch, sequences, [*self._keys, TRAJ_IDS, TRAJ_STEPS], [self.network])

    def check(self, batch: Step, sequences: Sequences) -> None:
        """Raise MissingKeyError if the network can't run along the sequences and past their ends."""
        check_starts(batch, self.states, sequences.segments.starts)
        for key in self._observed:
            if batch.get(next_key(key), None) is None:
                raise MissingKeyError(
                    f"The network reads {key!r}, but the batch has no {next_key(key)!r}, so the value after the last "
                    "step of a trajectory can't be computed. Pass a value_network that includes the trunk, from "
                    "observations (which exist under 'next') to the value."
                )

    def step(self, batch: Step, run: Step, where: Tensor | None) -> Step:
        """Run one step on the next observation of the tokens ``where`` (all tokens if None), flat.

        Args:
            batch: ``[*B, T]``.
            run: outputs of the pass along its sequences, whose states the step starts from.
            where: flat indices of tokens.
        """
        entries: dict[NestedKey, Tensor] = {key: gather_tokens(batch, next_key(key), where) for key in self._observed}
        entries |= {key: gather_tokens(run, next_key(key), where) for key in self.states}
        count = batch.batch_size.numel() if where is None else where.shape[0]
        if IS_INIT in self._keys:
            entries[IS_INIT] = torch.zeros(count, 1, dtype=torch.bool, device=run.get(IS_INIT).device)
        step = inputs_from(entries, torch.Size([count]), run.device, [self.network])
        with set_recurrent_mode(False):
            return self.network(step)


class Unroll(SequenceNetwork):
    """A network's output along sequences and one step past the end of each.

    Create one per call: later edits of the network are not seen.

    Args:
        network: TensorDict module from observations to ``out_key``, recurrent or not, including all encoders.
        out_key: key of the output, of any shape per token.

    Raises:
        ArgumentError: the network does not write ``out_key``.
    """

    def __init__(self, network: TensorDictModuleBase, out_key: NestedKey) -> None:
        check_writes("The network", network, out_key)
        super().__init__([network])
        self.out_key = out_key

    def run(self, batch: Step, sequences: Sequences) -> Step:
        """Run the network over the batch in recurrent mode and return its inputs and outputs; see :meth:`inputs`."""
        with set_recurrent_mode(True):
            return self.network(self.inputs(batch, sequences))

    def next_output(self, batch: Step, sequences: Sequences, run: Step) -> Tensor:
        """Return the output for the true next observation of every token, 0 where terminated: ``[*B, T, ...]``.

        Within a sequence, this is the output of the next token. At the end of a sequence, the network takes one step
        from the computed state in ``run`` (from :meth:`run`), never from a stored one.
        """
        output, shape = cast(Tensor, run.get(self.out_key)), batch.batch_size
        inner = output.shape[len(shape) :]
        flat = output.reshape(-1, *inner)

        def spread(flags: Tensor) -> Tensor:
            return flags.reshape(-1, *(1 for _ in inner))

        shifted = flat.roll(-1, 0).masked_fill(spread(sequences.terminated), 0.0)
        steps = (sequences.ends & ~sequences.terminated).reshape(-1)
        if sequences.last is not None:  # the values at other ends, those of padding, are not used
            after = self._output(batch, run, sequences.last)
            kept = spread(steps.index_select(0, sequences.last))
            shifted = shifted.index_put((sequences.last,), torch.where(kept, after, 0.0))
        elif bootstraps_at_ends_only(steps.device):
            where = steps.nonzero().squeeze(-1)
            if where.numel():
                shifted = shifted.index_put((where,), self._output(batch, run, where))
        else:  # reading the number of ends would synchronize with the device: step from every token
            shifted = torch.where(spread(steps), self._output(batch, run, None), shifted)
        return shifted.reshape(output.shape)

    def _output(self, batch: Step, run: Step, where: Tensor | None) -> Tensor:
        return cast(Tensor, self.step(batch, run, where).get(self.out_key))


def bootstraps_at_ends_only(device: torch.device) -> bool:
    """Return whether bootstrap steps are taken at the ends of sequences only, whose number is read from the device.

    Compiled code can't read it on any device.
    """
    return device.type in _GATHERED_ON and not is_compiling()


def external_inputs(modules: Iterable[TensorDictModuleBase]) -> list[NestedKey]:
    """Return the keys that the modules read and that no earlier module has written."""
    read, written = dict[NestedKey, None](), set[NestedKey]()
    for module in modules:
        read |= dict.fromkeys(key for key in map(normalize_key, module.in_keys) if key not in written)
        written |= set(map(normalize_key, module.out_keys))
    return list(read)


def gather_tokens(source: Step, key: NestedKey, where: Tensor | None) -> Tensor:
    """Return an entry ``[*B, T, ...]`` at the tokens ``where`` (all tokens if None), flat."""
    flat = cast(Tensor, source.get(key)).flatten(0, source.ndim - 1)
    return flat if where is None else flat.index_select(0, where)


def inputs_in_sequence(
    batch: Step, sequences: Sequences, keys: Sequence[NestedKey], networks: Sequence[Network]
) -> Step:
    """Return the entries ``keys`` of ``batch`` for ``networks``, with the starts of the sequences as ``"is_init"``.

    See :func:`~recurl.execution.lowering.inputs_of`. ``keys`` must include the trajectory keys.
    """
    run = inputs_of(batch, keys, networks)
    if IS_INIT in keys:
        run.set(IS_INIT, sequences.segments.starts.clone().reshape(*batch.batch_size, 1))
        sequences.segments.attach(run)
    return run


def _check_time(batch: Step) -> None:
    if batch.ndim == 0:
        raise ArgumentError("A batch must have a time dimension, [T] or [*B, T], got one of shape [].")
    names = getattr(batch, "names", [])
    if "time" in names and names[-1] != "time":
        raise ArgumentError(f"Time must be the last dimension of the batch, got dimensions named {names}.")
