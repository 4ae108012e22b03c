"""Networks of TensorDict modules that a loss runs, as calls on tensors where every module allows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase, skip_existing
from torch import Tensor
from torch import distributions as d

from recurl.entries import Entries, unmarked
from recurl.keys import NestedKey
from recurl.lowering import hooked, link, not_linkable
from recurl.objectives.common import Batch, from_entries

__all__ = ["LoweredNetwork", "distribution_of", "inputs_of", "made", "not_lowered"]


class LoweredNetwork:
    """TensorDict modules that run one after the other, on ``Entries`` where each of them is linkable.

    The results are the same bits either way.

    Args:
        modules: what :func:`~recurl.objectives.common.modules_in_order` returns.
        whole: the module that runs them in order, if that is one.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> network = LoweredNetwork([net])
        >>> network.reason() is None
        True
        >>> network(Entries({"observation": torch.zeros(4, 3)}, torch.Size([4])))["logits"].shape
        torch.Size([4, 2])
    """

    def __init__(self, modules: Sequence[TensorDictModuleBase], whole: TensorDictModuleBase | None = None) -> None:
        self.modules = tuple(modules)
        self._wholes = self.modules if whole is None else (whole,)
        self._unlinkable = next((why for module in modules if (why := not_linkable(module)) is not None), None)
        self._links = [] if self._unlinkable is not None else [link(module) for module in modules]

    def reason(self) -> str | None:
        """Say why the modules have to run on TensorDicts, or return None if they needn't."""
        return self._unlinkable or next(
            (why for module in (*self._wholes, *self.modules) if (why := hooked(module)) is not None), None
        )

    def __call__(self, run: Batch) -> Batch:
        """Run the modules on ``run`` (``Entries`` only when there is no :meth:`reason`), and return what they wrote to.

        That is ``run`` itself unless a module makes a new TensorDict.
        """
        if isinstance(run, Entries):
            for step in self._links:
                step(run)
            return run
        for module in self._wholes:
            run = module(run)
        return run


def not_lowered(networks: Iterable[LoweredNetwork]) -> str | None:
    """Say why one of ``networks`` has to run on TensorDicts, or return None if none has."""
    if skip_existing():
        return "tensordict's set_skip_existing is in force"
    return next((why for network in networks if (why := network.reason()) is not None), None)


def inputs_of(batch: Batch, keys: Iterable[NestedKey], networks: Iterable[LoweredNetwork]) -> Batch:
    """Return those of ``keys`` that ``batch`` has, in what ``networks`` run on: ``Entries``, or else a TensorDict.

    What a module writes there, nested entries included, doesn't reach ``batch``; the tensors are shared.
    """
    entries = {key: value for key in keys if (value := batch.get(key, None)) is not None}
    return made(entries, batch.batch_size, batch.device, networks)


def made(
    entries: Mapping[NestedKey, Tensor],
    batch_size: torch.Size,
    device: torch.device | None,
    networks: Iterable[LoweredNetwork],
) -> Batch:
    """Return ``entries`` in what ``networks`` run on."""
    if not_lowered(networks) is not None:
        return from_entries(entries, batch_size, device)
    run = Entries({}, batch_size, device)
    for key, value in entries.items():
        run.set(key, value)
    return run


def distribution_of(sampler: TensorDictModuleBase, run: Batch) -> d.Distribution:
    """Return the distribution that ``sampler``, the last module of a policy, makes of the parameters in ``run``."""
    if isinstance(run, Entries):
        plain = (
            getattr(type(sampler), "get_dist", None) is ProbabilisticTensorDictModule.get_dist
            or unmarked(sampler, "get_dist") is None
        )
        if not plain or not all(isinstance(run.get(key), Tensor) for key in sampler.in_keys):
            run = run.to_tensordict()
    return cast(Any, sampler).get_dist(run)
