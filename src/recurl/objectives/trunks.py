"""Networks of actor-critic losses from replay: parts that run along sequences, and heads that act on each token.

The tokens of a batch are extended by one step past the end of each sequence, so that a head runs once over both: what
it gives for a token is also what the token before needs as its next value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.func import functional_call

from recurl.keys import NestedKey, next_key, normalize_key
from recurl.lowering import Network, Step, inputs_from
from recurl.objectives.common import common_prefix
from recurl.objectives.sequences import Passes, Sequences, ends_are_gathered, inputs_in, picked

__all__ = ["Ahead", "Head", "Trunk", "TrunkRun", "depending_on", "outputs_of"]


class Ahead(NamedTuple):
    """Which steps past the ends of sequences follow the tokens of a batch.

    Attributes:
        where: flat indices of the tokens after which a step is made, ``[E]``; None for all tokens, E = N.
        following: index of the token that follows each one, among the N tokens and the E steps, ``[N]``. After a
            terminated token it is any.
    """

    where: Tensor | None
    following: Tensor

    @classmethod
    def of(cls, sequences: Sequences) -> Ahead:
        """Return the steps that ``sequences`` need."""
        ends = sequences.ends.reshape(-1)
        tokens = torch.arange(ends.numel(), device=ends.device)
        if sequences.last is not None:
            return cls._after(sequences.last, tokens)
        if not ends_are_gathered(ends.device):  # their number can't be read without synchronisation
            following = torch.where(ends, ends.numel() + tokens, tokens + 1)
            return cls(None, following)
        where = (ends & ~sequences.terminated.reshape(-1)).nonzero().squeeze(-1)
        return cls._after(where, tokens)

    @classmethod
    def _after(cls, where: Tensor, tokens: Tensor) -> Ahead:
        steps = torch.arange(tokens.numel(), tokens.numel() + where.numel(), device=tokens.device)
        following = (tokens + 1).index_put((where,), steps)
        return cls(where, following.clamp_max(tokens.numel() + where.numel() - 1))


class TrunkRun(NamedTuple):
    """A trunk after its pass along the sequences, with what it read and wrote."""

    trunk: Trunk
    batch: Step
    run: Step

    def entries(self, keys: Iterable[NestedKey], ahead: Ahead | None = None) -> dict[NestedKey, Tensor]:
        """Return the entries ``keys``, which the trunk wrote or the batch holds, flat: ``[N (+ E), ...]``.

        Args:
            keys: their keys.
            ahead: the steps past the ends, in which entries of the batch are those under ``"next"``; None for none.
                They have no gradients.
        """
        if ahead is not None and ahead.where is not None and not ahead.where.numel():
            ahead = None
        with torch.no_grad():
            step = None if ahead is None else self.trunk.step(self.batch, self.run, ahead.where)
        found: dict[NestedKey, Tensor] = {}
        for key in keys:
            written = key in self.trunk.writes
            value = (self.run if written else self.batch).get(key, None)
            if value is None:
                continue  # the head itself raises
            flat = cast(Tensor, value).flatten(0, self.batch.ndim - 1)
            if ahead is None or step is None:
                found[key] = flat
                continue
            after = step.get(key) if written else picked(self.batch, next_key(key), ahead.where)
            found[key] = torch.cat([flat, after])
        return found


class Trunk(Passes):
    """Modules that run along sequences, such as encoder and memory: the first part of a network.

    Args:
        modules: the modules in order; may be none.
        also: entries of the batch that the head reads besides.
    """

    def __init__(self, modules: Sequence[TensorDictModuleBase], also: Iterable[NestedKey] = ()) -> None:
        super().__init__(modules, also)
        self.modules = list(modules)
        self.writes = set(outputs_of(modules))

    def along(
        self, batch: Step, sequences: Sequences, earlier: Sequence[TrunkRun] = (), *, detached: bool = False
    ) -> TrunkRun:
        """Run the modules along the sequences; those at the beginning that ran before are not run again.

        Args:
            batch: ``[*B, T]``.
            sequences: those of the batch.
            earlier: passes of other trunks over the same batch.
            detached: stop gradients at what the earlier passes wrote.
        """
        run = self.inputs(batch, sequences)
        count, source = max(((self._common(other), i) for i, other in enumerate(earlier)), default=(0, 0))
        for key in outputs_of(self.modules[:count]):
            value = earlier[source].run.get(key)
            run.set(key, value.detach() if detached else value)
        return TrunkRun(self, batch, self.network(run) if not count else Network(self.modules[count:])(run))

    def _common(self, other: TrunkRun) -> int:
        """Return how many modules at the beginning both have, whose outputs are still in the other's pass."""
        count = common_prefix(self.modules, other.trunk.modules)
        kept = not set(outputs_of(self.modules[:count])) & set(outputs_of(other.trunk.modules[count:]))
        return count if kept else 0


class Head:
    """Modules that act on each token alone: the last part of a network.

    Args:
        modules: the modules in order; may be none.
        given: entries that the caller gives, such as an action.
    """

    def __init__(self, modules: Sequence[TensorDictModuleBase], given: Iterable[NestedKey] = ()) -> None:
        self.modules = list(modules)
        self.network = Network(self.modules)
        self.reads = [key for key in inputs_in(modules) if key not in set(given)]

    def __call__(self, entries: dict[NestedKey, Tensor], *, frozen: bool = False) -> Step:
        """Run the modules on flat ``entries``, ``[M, ...]``.

        Args:
            entries: what they read.
            frozen: let no gradient reach the parameters, while it passes to the entries.
        """
        first = next(iter(entries.values()))
        run = inputs_from(entries, first.shape[:1], None, [self.network])
        if not frozen:
            return self.network(run)
        held = _Held(self.modules)
        parameters = {name: value.detach() for name, value in held.named_parameters()}
        return cast(Step, functional_call(held, parameters, (run,)))


class _Held(nn.Module):
    """Modules as one, whose parameters ``functional_call`` replaces."""

    def __init__(self, modules: Sequence[TensorDictModuleBase]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, run: Step) -> Step:
        return Network(cast(Any, list(self.held)))(run)


def outputs_of(modules: Iterable[TensorDictModuleBase]) -> list[NestedKey]:
    """Return the keys that the modules write."""
    return list(dict.fromkeys(normalize_key(key) for module in modules for key in module.out_keys))


def depending_on(keys: Iterable[NestedKey], modules: Iterable[TensorDictModuleBase]) -> list[TensorDictModuleBase]:
    """Return those of ``modules`` that read one of ``keys``, or what such a module wrote."""
    tainted, found = set(keys), list[TensorDictModuleBase]()
    for module in modules:
        if tainted & set(map(normalize_key, module.in_keys)):
            found.append(module)
            tainted |= set(map(normalize_key, module.out_keys))
    return found
