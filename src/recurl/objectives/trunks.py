"""Sequence trunks and token heads of the networks of replay losses, and the bootstrap steps past sequence ends.

A trunk runs along sequences and a head acts on each token. The tokens of a batch are extended by one bootstrap step
past the end of each sequence, and a head runs once over both: its output for a token is also the next value of the
token before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.func import functional_call

from recurl.core.keys import NestedKey, next_key, normalize_key
from recurl.execution.lowering import Network, inputs_from
from recurl.objectives.common import common_prefix
from recurl.objectives.sequences import (
    SequenceNetwork,
    Sequences,
    bootstraps_at_ends_only,
    external_inputs,
    gather_tokens,
)
from recurl.sequences.entries import Step

__all__ = ["BootstrapSteps", "SequenceTrunk", "TokenHead", "UnrolledTrunk", "depending_on", "outputs_of"]


class BootstrapSteps(NamedTuple):
    """Bootstrap steps of a batch: one step past the end of each sequence, to the true next observation.

    Attributes:
        where: flat indices of the tokens after which a step is made, ``[E]``; None for all tokens, E = N.
        successor: index of each token's successor among the N tokens and the E steps, ``[N]``. Arbitrary after a
            terminated token.
    """

    where: Tensor | None
    successor: Tensor

    @classmethod
    def of(cls, sequences: Sequences) -> BootstrapSteps:
        """Return the bootstrap steps that ``sequences`` need."""
        ends = sequences.ends.reshape(-1)
        tokens = torch.arange(ends.numel(), device=ends.device)
        if sequences.last is not None:
            return cls._after(sequences.last, tokens)
        if not bootstraps_at_ends_only(ends.device):  # reading their number would synchronize with the device
            successor = torch.where(ends, ends.numel() + tokens, tokens + 1)
            return cls(None, successor)
        where = (ends & ~sequences.terminated.reshape(-1)).nonzero().squeeze(-1)
        return cls._after(where, tokens)

    @classmethod
    def _after(cls, where: Tensor, tokens: Tensor) -> BootstrapSteps:
        steps = torch.arange(tokens.numel(), tokens.numel() + where.numel(), device=tokens.device)
        successor = (tokens + 1).index_put((where,), steps)
        return cls(where, successor.clamp_max(tokens.numel() + where.numel() - 1))


class UnrolledTrunk(NamedTuple):
    """A trunk after its pass along the sequences of a batch.

    Attributes:
        trunk: the trunk.
        batch: the batch, ``[*B, T]``.
        outputs: the entries that the trunk read and wrote.
    """

    trunk: SequenceTrunk
    batch: Step
    outputs: Step

    def entries(self, keys: Iterable[NestedKey], bootstrap: BootstrapSteps | None = None) -> dict[NestedKey, Tensor]:
        """Return entries written by the trunk or held by the batch, flat: ``[N (+ E), ...]``.

        Args:
            keys: keys of the entries.
            bootstrap: append these bootstrap steps, without gradients. Entries of the batch are then read under
                ``"next"``. None appends none.
        """
        if bootstrap is not None and bootstrap.where is not None and not bootstrap.where.numel():
            bootstrap = None
        with torch.no_grad():
            step = None if bootstrap is None else self.trunk.step(self.batch, self.outputs, bootstrap.where)
        found: dict[NestedKey, Tensor] = {}
        for key in keys:
            written = key in self.trunk.writes
            value = (self.outputs if written else self.batch).get(key, None)
            if value is None:
                continue  # the head raises
            flat = cast(Tensor, value).flatten(0, self.batch.ndim - 1)
            if bootstrap is None or step is None:
                found[key] = flat
                continue
            after = step.get(key) if written else gather_tokens(self.batch, next_key(key), bootstrap.where)
            found[key] = torch.cat([flat, after])
        return found


class SequenceTrunk(SequenceNetwork):
    """First part of a network: modules that run along sequences, such as encoder and memory.

    Args:
        modules: the modules in order; may be empty.
        extra_keys: further entries of the batch that the head reads.
    """

    def __init__(self, modules: Sequence[TensorDictModuleBase], extra_keys: Iterable[NestedKey] = ()) -> None:
        super().__init__(modules, extra_keys)
        self.modules = list(modules)
        self.writes = set(outputs_of(modules))

    def unroll(
        self, batch: Step, sequences: Sequences, earlier: Sequence[UnrolledTrunk] = (), *, detached: bool = False
    ) -> UnrolledTrunk:
        """Run the modules along the sequences, reusing outputs of leading modules that already ran.

        Args:
            batch: ``[*B, T]``.
            sequences: sequences of the batch.
            earlier: other trunks, unrolled over the same batch.
            detached: detach the reused outputs.
        """
        run = self.inputs(batch, sequences)
        count, source = max(((self._common(other), i) for i, other in enumerate(earlier)), default=(0, 0))
        for key in outputs_of(self.modules[:count]):
            value = earlier[source].outputs.get(key)
            run.set(key, value.detach() if detached else value)
        return UnrolledTrunk(self, batch, self.network(run) if not count else Network(self.modules[count:])(run))

    def _common(self, other: UnrolledTrunk) -> int:
        """Return the number of leading modules shared with ``other``; 0 if it has overwritten their outputs."""
        count = common_prefix(self.modules, other.trunk.modules)
        kept = not set(outputs_of(self.modules[:count])) & set(outputs_of(other.trunk.modules[count:]))
        return count if kept else 0


class TokenHead:
    """Last part of a network: modules that act on each token separately.

    Args:
        modules: the modules in order; may be empty.
        given: entries that the caller supplies, such as an action.
    """

    def __init__(self, modules: Sequence[TensorDictModuleBase], given: Iterable[NestedKey] = ()) -> None:
        self.modules = list(modules)
        self.network = Network(self.modules)
        self.reads = [key for key in external_inputs(modules) if key not in set(given)]

    def __call__(self, entries: dict[NestedKey, Tensor], *, frozen: bool = False) -> Step:
        """Run the modules on flat ``entries``, ``[M, ...]``.

        Args:
            entries: their inputs.
            frozen: compute gradients with respect to the entries, but not the parameters.
        """
        first = next(iter(entries.values()))
        run = inputs_from(entries, first.shape[:1], None, [self.network])
        if not frozen:
            return self.network(run)
        holder = _ModuleHolder(self.modules)
        parameters = {name: value.detach() for name, value in holder.named_parameters()}
        return cast(Step, functional_call(holder, parameters, (run,)))


class _ModuleHolder(nn.Module):
    """Wrapper of several modules in one, for ``functional_call``."""

    def __init__(self, modules: Sequence[TensorDictModuleBase]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, run: Step) -> Step:
        return Network(cast(Any, list(self.parts)))(run)


def outputs_of(modules: Iterable[TensorDictModuleBase]) -> list[NestedKey]:
    """Return the keys that the modules write."""
    return list(dict.fromkeys(normalize_key(key) for module in modules for key in module.out_keys))


def depending_on(keys: Iterable[NestedKey], modules: Iterable[TensorDictModuleBase]) -> list[TensorDictModuleBase]:
    """Return the ``modules`` that depend on ``keys``, directly or through the outputs of such a module."""
    tainted, found = set(keys), list[TensorDictModuleBase]()
    for module in modules:
        if tainted & set(map(normalize_key, module.in_keys)):
            found.append(module)
            tainted |= set(map(normalize_key, module.out_keys))
    return found
