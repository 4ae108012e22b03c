"""Networks of losses: modules that run in order, on ``Entries`` if all of them can be lowered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor
from torch import distributions as d

from recurl.core.keys import NestedKey, normalize_key
from recurl.core.torch_compat import has_hooks
from recurl.execution.explain import Explanation, NotCompiled, reason_of
from recurl.execution.lowering.module import Links, children_in_order, hooked
from recurl.sequences.entries import Entries, Step, unmarked
from recurl.sequences.index import pass_on
from recurl.sequences.tensordict_compat import returns_other_entries

__all__ = [
    "Network",
    "distribution_of",
    "explain",
    "inputs_from",
    "inputs_of",
    "modules_in_order",
    "modules_leading_to",
    "obstacle_of",
    "shared_state",
    "why_whole",
]


class Network:
    """TensorDict modules that run one after another; results on ``Entries`` are bitwise equal.

    Create one for each call: later edits of the module tree are not seen.

    Args:
        modules: modules in order, as :func:`modules_in_order` returns them.

    Attributes:
        modules: see above.
        obstacle: the reason why they need TensorDicts, or None if they can be lowered.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from recurl.execution.lowering import Entries
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> network = Network([net])
        >>> network.obstacle is None
        True
        >>> network(Entries({"observation": torch.zeros(4, 3)}, torch.Size([4])))["logits"].shape
        torch.Size([4, 2])
    """

    __slots__ = ("_links", "modules", "obstacle")

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = tuple(modules)
        self.obstacle: str | None = None
        try:
            self._links = Links(self.modules)
        except NotCompiled as reason:
            self.obstacle = str(reason)

    def __call__(self, run: Step) -> Step:
        """Run the modules on ``run`` (``Entries`` only if they can be lowered) and return the result.

        The result is ``run`` itself unless a module creates a new TensorDict.
        """
        if isinstance(run, Entries):
            return self._links(run)
        for module in self.modules:
            run = module(run)
        return run


def obstacle_of(networks: Iterable[Network]) -> str | None:
    """Return the reason why one of ``networks`` needs TensorDicts, or None if all can be lowered."""
    return next((network.obstacle for network in networks if network.obstacle is not None), None)


def explain(what: str, networks: Iterable[Network]) -> Explanation:
    """Explain whether ``networks``, called ``what``, run on tensors."""
    return Explanation(what, {"tensors": obstacle_of(networks)})


def inputs_of(batch: Step, keys: Iterable[NestedKey], networks: Iterable[Network]) -> Step:
    """Return the entries ``keys`` of ``batch`` as ``Entries`` if all ``networks`` can be lowered, else as a TensorDict.

    Missing keys are skipped. Tensors are shared with ``batch``, but new entries, nested ones included, don't reach it.
    An attached sequence index is passed on.
    """
    entries = {key: value for key in keys if (value := batch.get(key, None)) is not None}
    run = inputs_from(entries, batch.batch_size, batch.device, networks)
    pass_on(batch, run)
    return run


def inputs_from(
    entries: Mapping[NestedKey, Tensor],
    batch_size: torch.Size,
    device: torch.device | None,
    networks: Iterable[Network],
) -> Step:
    """Return ``entries`` as ``Entries`` if all ``networks`` can be lowered, else as a TensorDict."""
    lowered = obstacle_of(networks) is None
    run: Any = Entries({}, batch_size, device) if lowered else TensorDict({}, batch_size, device=device)
    for key, value in entries.items():
        run.set(key, value)
    return run


def modules_in_order(module: TensorDictModuleBase, *, ignore_global_hooks: bool = False) -> list[TensorDictModuleBase]:
    """Return the modules that ``module`` runs one after another, with nested sequences flattened.

    A sequence that selects its outputs, has hooks, or does more than run its modules is kept as one module.

    Args:
        module: a module or a sequence.
        ignore_global_hooks: flatten sequences even under global module hooks, which then don't see the sequences.
    """
    if not isinstance(module, TensorDictSequential) or (hooked(module) is not None and not ignore_global_hooks):
        return [module]
    if has_hooks(module) or returns_other_entries(module):
        return [module]
    try:
        children = children_in_order(module)
    except NotCompiled:
        return [module]
    return [leaf for child in children for leaf in modules_in_order(child, ignore_global_hooks=ignore_global_hooks)]


def why_whole(sequence: TensorDictSequential) -> str:
    """Return the reason why :func:`modules_in_order` keeps ``sequence`` as one module."""
    selects = f"{type(sequence).__name__} selects its outputs"
    return hooked(sequence) or reason_of(lambda: children_in_order(sequence)) or selects


def modules_leading_to(module: TensorDictModuleBase, keys: Iterable[NestedKey]) -> list[TensorDictModuleBase]:
    """Return the modules of ``module``, in order, that the outputs ``keys`` depend on."""
    wanted, needed = set(keys), list[TensorDictModuleBase]()
    for part in reversed(modules_in_order(module)):
        written = {normalize_key(key) for key in part.out_keys}
        if wanted & written:
            needed.insert(0, part)
            wanted = wanted - written | {normalize_key(key) for key in part.in_keys}
    return needed


def distribution_of(sampler: TensorDictModuleBase, run: Step) -> d.Distribution:
    """Return the distribution that ``sampler``, the last module of a policy, builds from the parameters in ``run``."""
    if isinstance(run, Entries):
        plain = (
            getattr(type(sampler), "get_dist", None) is ProbabilisticTensorDictModule.get_dist
            or unmarked(sampler, "get_dist") is None
        )
        if not plain or not all(isinstance(run.get(key), Tensor) for key in sampler.in_keys):
            run = run.to_tensordict()
    return cast(Any, sampler).get_dist(run)


def shared_state(modules: Iterable[Any]) -> NestedKey | None:
    """Return a recurrent-state key that two of ``modules`` share, or None.

    Args:
        modules: modules of one or several networks; those without ``state_keys`` are skipped. Those in different
            ``alternatives`` of a module, of which each token runs one, may share keys.

    Example:
        >>> from recurl.modules import GRUModule
        >>> first, second = (GRUModule(2, 3, in_key="observation", out_key="features") for _ in range(2))
        >>> print(shared_state([first, first]), shared_state([first, second]))
        None recurrent_state
    """
    modules = list(modules)
    whole: dict[int, Any] = {}  # the module of whose alternatives a module is a part, by its id
    for module in modules:
        for alternative in getattr(module, "alternatives", ()):
            parts = list(alternative.modules())
            if (shared := shared_state(parts)) is not None:
                return shared
            whole.update((id(part), module) for part in parts)
    owners: dict[NestedKey, Any] = {}
    for module in modules:
        for key in getattr(module, "state_keys", ()):
            owner = whole.get(id(module), module)
            if owners.setdefault(key, owner) is not owner:
                return key
    return None
