"""Policies and critics: TensorDict modules that wrap networks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import distributions as d
from torch import nn

from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UsageError
from recurl.core.keys import ACTION, OBSERVATION, STATE_VALUE, NestedKey, normalize_key
from recurl.execution.explain import NotCompiled
from recurl.execution.lowering import Link, in_order
from recurl.sequences.entries import Entries, Step, takes_entries, unmarked
from recurl.sequences.mode import ExplorationType, exploration_type

__all__ = ["ActorValueOperator", "ProbabilisticActor", "Sampler", "SamplingSequence", "ValueOperator"]

_Keys = NestedKey | Sequence[NestedKey]
_GENERATORS = ("_generator", "_generator_key")
_JOINT = ("sample_and_log_prob", "rsample_and_log_prob")
_STATE_ACTION_VALUE = "state_action_value"
SCALE_HINT = (
    "A network with a single output needs a NormalParamExtractor after it, which splits the last dimension into a "
    "location and a positive scale: nn.Sequential(MLP(..., out_features=2 * action_dim), NormalParamExtractor())."
)


class Sampler(ProbabilisticTensorDictModule):
    """Sampler of an actor, its last module. Names the missing entries if a parameter of the distribution is absent."""

    @takes_entries
    def get_dist(self, tensordict: Step) -> d.Distribution:
        """Return the distribution of the parameters in ``tensordict``."""
        missing = [key for key in self.in_keys if tensordict.get(key, None) is None]
        if missing:
            raise MissingKeyError(
                f"The distribution {_name_of(self.distribution_class)} needs the entries {list(self.in_keys)}, but "
                f"{missing} are neither written by the actor's module nor in the batch, which has "
                f"{sorted(map(str, tensordict.keys()))}. {SCALE_HINT}"
            )
        return super().get_dist(cast(Any, tensordict))  # it only calls ``get``

    def log_prob(self, tensordict: Any, *, dist: d.Distribution | None = None) -> Any:
        """Return the log-probability of the action in ``tensordict``, joint over all its parts."""
        if len(self.dist_sample_keys) == 1:
            return super().log_prob(tensordict, dist=dist)
        made: Any = self.get_dist(tensordict) if dist is None else dist
        if isinstance(made, CompositeDistribution):
            return super().log_prob(tensordict, dist=dist)
        return made.log_prob(*(tensordict.get(key) for key in self.dist_sample_keys))

    def link_entries(self) -> Link:
        """Return a function of ``Entries`` equivalent to :meth:`forward` under the current exploration type.

        Raises:
            NotCompiled: there is none, for uncommon distributions or ways of sampling.
        """
        reason = unmarked(self, "get_dist")
        if reason is not None or type(self).forward is not Sampler.forward or "forward" in vars(self):
            raise NotCompiled(reason or f"{type(self).__name__} has a custom forward")
        kind = exploration_type() or self.default_interaction_type
        distribution: Any = self.distribution_class
        custom = self.num_samples is not None or any(getattr(self, name, None) is not None for name in _GENERATORS)
        if custom or not isinstance(distribution, type) or issubclass(distribution, CompositeDistribution):
            raise NotCompiled(f"the sampler of {_name_of(distribution)} draws several samples or entries")
        deterministic = kind is ExplorationType.DETERMINISTIC and hasattr(distribution, "deterministic_sample")
        if kind is not ExplorationType.RANDOM and not deterministic:
            raise NotCompiled(f"{_name_of(distribution)} under {kind} is sampled by tensordict")
        if any(hasattr(distribution, name) for name in _JOINT):
            raise NotCompiled(f"{_name_of(distribution)} draws a sample together with its log-probability")
        actions = [normalize_key(key) for key in self.dist_sample_keys]
        log_prob = normalize_key(self.log_prob_key) if self.return_log_prob else None

        def draw(entries: Entries) -> None:
            dist: Any = self.get_dist(entries)
            value = (
                dist.deterministic_sample if deterministic else dist.rsample() if dist.has_rsample else dist.sample()
            )
            values = value if isinstance(value, tuple) else (value,)
            for key, part in zip(actions, values, strict=True):
                entries.set(key, part)
            if log_prob is not None:
                entries.set(log_prob, dist.log_prob(*values))

        return draw


class SamplingSequence(ProbabilisticTensorDictSequential):
    """A flat sequence that ends with a sampler, with a helpful error if the network outputs no scale."""

    @in_order
    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override] # tensordict wraps its own
        """Write parameters, action and, if requested, its log-probability into the TensorDict, and return it."""
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError as error:
            explain_missing_scale(error)
            raise

    @property
    def _det_part(self) -> TensorDictSequential:
        # tensordict keeps the sequence of construction time, without modules replaced since
        return TensorDictSequential(*list(cast(Any, self.module))[:-1])

    def get_dist_params(self, *args: Any, **kwargs: Any) -> Any:
        """Write the parameters of the distribution only."""
        try:
            return super().get_dist_params(*args, **kwargs)
        except RuntimeError as error:
            explain_missing_scale(error)
            raise


class ProbabilisticActor(SamplingSequence):
    """Stochastic policy: a module that writes the parameters of a distribution, and a sampler of actions.

    Args:
        module: TensorDict module (or a sequence of them) that writes the parameters.
        in_keys: entries that hold the parameters. The last part of each key is the keyword argument of
            ``distribution_class`` that it is passed as. A dict ``{argument: entry}`` makes this explicit, for instance
            ``{"logits": "logits", "mask": "action_mask"}``.
        out_keys: key of the action: by default the leaf of ``spec`` if that is a ``Composite``, else ``"action"``. An
            action of several parts has one key per part, such as ``("action", "move")``, in the order of the
            distribution's samples, which are then tuples (:class:`~recurl.modules.ActionDistribution`).
        spec: the action spec. A ``Composite`` must contain all ``out_keys``. Stored as ``.spec``.
        distribution_class: class (or function) that creates the distribution, such as ``OneHotCategorical`` or
            ``TanhNormal``.
        distribution_kwargs: further keyword arguments of ``distribution_class``, such as
            ``{"low": -2.0, "high": 2.0}``.
        return_log_prob: also write the log-probability of the action (joint over all its parts) to ``log_prob_key``,
            shape ``[*B]``, as required by PPO.
        log_prob_key: key of the log-probability, which losses learn from the policy; when None, that of the action with
            ``_log_prob``, as in ``"action_log_prob"``.
        default_interaction_type: how to act outside of ``set_exploration_type`` blocks; deterministic by default.

    Raises:
        ArgumentTypeError: ``module`` is not a TensorDict module.
        ArgumentError: an out key is not in ``spec``; the distribution doesn't accept such parameters.
        UsageError: when called, if ``module`` returns one tensor where a location and a scale are expected.
        MissingKeyError: when called, if a parameter of the distribution is missing.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from recurl.modules.distributions import OneHotCategorical
        >>> from recurl.modules.networks import MLP
        >>> net = TensorDictModule(MLP(4, 2), in_keys=["observation"], out_keys=["logits"])
        >>> actor = ProbabilisticActor(
        ...     net, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
        ... )
        >>> td = actor(TensorDict({"observation": torch.zeros(3, 4)}, [3]))
        >>> td["action"].shape, td["action_log_prob"].shape
        (torch.Size([3, 2]), torch.Size([3]))
    """

    def __init__(
        self,
        module: TensorDictModuleBase,
        in_keys: _Keys | Mapping[str, NestedKey],
        out_keys: _Keys | None = None,
        *,
        spec: Any = None,
        distribution_class: Callable[..., d.Distribution],
        distribution_kwargs: Mapping[str, Any] | None = None,
        return_log_prob: bool = False,
        log_prob_key: NestedKey | None = None,
        default_interaction_type: ExplorationType = ExplorationType.DETERMINISTIC,
    ) -> None:
        if not isinstance(module, TensorDictModuleBase):  # type: ignore[reportUnnecessaryIsInstance] # users err
            raise ArgumentTypeError(
                f"ProbabilisticActor needs a TensorDict module that writes {in_keys!r}, got {type(module).__name__}: "
                "wrap it, TensorDictModule(net, in_keys=[...], out_keys=[...])."
            )
        _check_parameters(distribution_class, in_keys, distribution_kwargs or {})
        out = _out_keys(out_keys, spec)
        composite = isinstance(distribution_class, type) and issubclass(distribution_class, CompositeDistribution)
        joint = f"{ACTION}_log_prob" if len(out) > 1 and not composite else None
        log_prob: Any = joint if log_prob_key is None else log_prob_key
        sampler = Sampler(
            dict(in_keys) if isinstance(in_keys, Mapping) else _as_list(in_keys),  # type: ignore[arg-type] # tensordict's key type
            out,  # type: ignore[arg-type] # tensordict's own, invariant key type
            distribution_class=distribution_class,  # type: ignore[arg-type] # a function does as well
            distribution_kwargs=dict(distribution_kwargs or {}),
            return_log_prob=return_log_prob,
            log_prob_keys=None if log_prob is None else [log_prob],
            default_interaction_type=default_interaction_type,
        )
        super().__init__(module, sampler)
        self.spec = spec


def _check_parameters(
    distribution: Callable[..., d.Distribution], in_keys: _Keys | Mapping[str, NestedKey], more: Mapping[str, Any]
) -> None:
    """Raise ArgumentError unless the parameters match the signature of ``distribution``."""
    keys = in_keys if isinstance(in_keys, Mapping) else _as_list(in_keys)
    names = [key if isinstance(key, str) else key[-1] for key in keys]
    try:
        inspect.signature(distribution).bind(**dict.fromkeys([*names, *more]))
    except TypeError as error:
        raise ArgumentError(
            f"The parameters of {_name_of(distribution)} must be named after its arguments, and none may be missing; "
            f"got {names}: {error}. Rename them with in_keys={{argument: entry}}. {SCALE_HINT}"
        ) from error


class ValueOperator(TensorDictModule):
    """Critic: a network whose output of size 1 is the value of a state, or of a state and an action.

    Args:
        module: network, ``[*B, F] -> [*B, 1]``.
        in_keys: entries that the network reads; ``["observation"]`` by default.
        out_keys: key of the value: by default ``"state_value"``, or ``"state_action_value"`` if ``"action"`` is read.

    Example:
        >>> from tensordict import TensorDict
        >>> import torch
        >>> from recurl.modules.networks import MLP
        >>> critic = ValueOperator(MLP(4, 1), in_keys=["observation"])
        >>> critic(TensorDict({"observation": torch.zeros(3, 4)}, [3]))["state_value"].shape
        torch.Size([3, 1])
    """

    def __init__(self, module: nn.Module, in_keys: _Keys | None = None, out_keys: _Keys | None = None) -> None:
        inputs = [OBSERVATION] if in_keys is None else _as_list(in_keys)
        if out_keys is None:
            out_keys = [_STATE_ACTION_VALUE if ACTION in inputs else STATE_VALUE]
        super().__init__(module, in_keys=inputs, out_keys=_as_list(out_keys))  # type: ignore[arg-type] # likewise


class ActorValueOperator(TensorDictSequential):
    """Actor and critic with a shared trunk.

    Args:
        common_operator: module that writes the features read by both heads, for instance an LSTM.
        policy_operator: policy head, usually a :class:`ProbabilisticActor` on the features.
        value_operator: value head, usually a :class:`ValueOperator` on the features.

    The operators returned by the methods below contain the *same* trunk, so training one changes the other, and a loss
    that is given both runs the trunk once.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from recurl.modules import ProbabilisticActor, ValueOperator
        >>> from recurl.modules.distributions import Categorical
        >>> from recurl.modules.networks import MLP
        >>> trunk = TensorDictModule(MLP(4, 8), in_keys=["observation"], out_keys=["features"])
        >>> head = TensorDictModule(MLP(8, 2), in_keys=["features"], out_keys=["logits"])
        >>> actor = ProbabilisticActor(head, in_keys=["logits"], distribution_class=Categorical)
        >>> both = ActorValueOperator(trunk, actor, ValueOperator(MLP(8, 1), in_keys=["features"]))
        >>> td = both.get_policy_operator()(TensorDict({"observation": torch.zeros(3, 4)}, [3]))
        >>> "action" in td, "state_value" in td
        (True, False)
    """

    def __init__(
        self,
        common_operator: TensorDictModuleBase,
        policy_operator: TensorDictModuleBase,
        value_operator: TensorDictModuleBase,
    ) -> None:
        super().__init__(common_operator, policy_operator, value_operator)

    def get_policy_operator(self) -> TensorDictSequential:
        """Return trunk and policy head as one policy."""
        common, actor, _ = self.module
        if isinstance(actor, ProbabilisticTensorDictSequential):
            # Flat, because tensordict's get_dist doesn't descend into a nested sequence.
            return SamplingSequence(common, *cast(Any, actor.module))  # type: ignore[arg-type] # a ModuleList forgets types
        return TensorDictSequential(common, actor)

    def get_value_operator(self) -> TensorDictSequential:
        """Return trunk and value head as one critic, from observations to values."""
        common, _, value = self.module
        return TensorDictSequential(common, value)


def _as_list(keys: _Keys) -> list[NestedKey]:
    if isinstance(keys, str | tuple):
        return [normalize_key(keys)]
    return [normalize_key(key) for key in keys]


def _out_keys(out_keys: _Keys | None, spec: Any) -> list[NestedKey]:
    in_spec = None if spec is None or not hasattr(spec, "keys") else set(spec.keys(True, True))
    if out_keys is None:
        return [ACTION] if in_spec is None else sorted(in_spec, key=str)
    out = _as_list(out_keys)
    if in_spec is not None and not in_spec.issuperset(out):
        raise ArgumentError(f"Every out key of the actor must be in its spec, got {out} and a spec of {in_spec}.")
    return out


def _name_of(distribution: object) -> str:
    return getattr(distribution, "__name__", repr(distribution))


def explain_missing_scale(error: RuntimeError) -> None:
    """Raise a UsageError that names NormalParamExtractor if ``error`` is tensordict's about missing outputs."""
    if "more out_keys than tensors" in str(error):
        raise UsageError(f"A module of the actor returned fewer tensors than its out_keys. {SCALE_HINT}") from error
