"""Actor heads: output layer and distribution for each kind of action."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from recurl.core import specs
from recurl.core.errors import UnsupportedError
from recurl.core.keys import ACTION, ACTION_MASK, NestedKey
from recurl.modules import (
    ActionDistribution,
    Categorical,
    MaskedCategorical,
    NormalParamExtractor,
    TanhNormal,
    action_parts,
)
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.layers import make_head

_OUTPUTS = "action_outputs"


class NaNSafeCategorical(Categorical):
    """``Categorical`` with the same samples that also samples from NaN probabilities instead of raising.

    Collection of a batch with a NaN observation can then finish, and the trainer reports where the NaN first occurred.
    On a GPU, a failed device-side assertion on such probabilities would make the device unusable.

    Example:
        >>> NaNSafeCategorical(logits=torch.full((2, 3), torch.nan)).sample().shape
        torch.Size([2])
    """

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Sample choices, ``[*sample_shape, *B]`` int64."""
        probs = self.probs.detach().expand(*sample_shape, *self.batch_shape, -1)
        return torch.div(probs, torch.empty_like(probs).exponential_()).max(-1).indices


class MaskedNaNSafeCategorical(NaNSafeCategorical, MaskedCategorical):
    """``NaNSafeCategorical`` restricted to the choices that a mask allows."""


class ActionHead(NamedTuple):
    """Last layer of an actor and the arguments of its ``ProbabilisticActor``."""

    module: TensorDictModule
    sampler: dict[str, Any]


def make_action_head(
    config: RunConfig, memory: NestedKey, spec: specs.TensorSpec, *, masked: bool, gain: float = 0.01
) -> ActionHead:
    """Build the untrained head of an actor.

    Args:
        config: sizes of the layers.
        memory: key of the input.
        spec: action spec of one environment.
        masked: whether there is an action mask.
        gain: gain of the initialization; a small one makes all actions nearly equally likely at first.

    Raises:
        UnsupportedError: no distribution supports the action or a part of it.
    """
    try:
        parts = action_parts(spec, NaNSafeCategorical)
    except UnsupportedError as error:
        raise UnsupportedError(f"{config.algorithm.upper()} can't choose the action {error}") from error
    if isinstance(spec, specs.Categorical) and not spec.shape:
        layer = TensorDictModule(make_head(config, spec.n, gain), in_keys=[memory], out_keys=["logits"])
        keys = {"logits": "logits", "mask": ACTION_MASK} if masked else ["logits"]
        kind = MaskedNaNSafeCategorical if masked else NaNSafeCategorical
        return ActionHead(layer, {"in_keys": keys, "out_keys": [ACTION], "distribution_class": kind})
    if isinstance(spec, specs.Bounded) and len(spec.shape) == 1:
        net = nn.Sequential(make_head(config, 2 * spec.shape[0], gain), NormalParamExtractor())
        layer = TensorDictModule(net, in_keys=[memory], out_keys=["loc", "scale"])
        bounds = {"low": spec.low, "high": spec.high}
        of_box = {"distribution_class": TanhNormal, "distribution_kwargs": bounds}
        return ActionHead(layer, {"in_keys": ["loc", "scale"], "out_keys": [ACTION], **of_box})
    outputs = sum(part.parameters for part in parts.values())
    layer = TensorDictModule(make_head(config, outputs, gain), in_keys=[memory], out_keys=[_OUTPUTS])
    keys = {"outputs": _OUTPUTS, **({"mask": ACTION_MASK} if masked else {})}
    of_parts = {"distribution_class": ActionDistribution, "distribution_kwargs": {"parts": tuple(parts.values())}}
    return ActionHead(layer, {"in_keys": keys, "out_keys": list(parts), **of_parts})
