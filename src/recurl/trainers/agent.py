"""Actor and critic networks for any flat environment: encoder, memory, heads."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from recurl import specs
from recurl.errors import UnsupportedError
from recurl.keys import ACTION, IS_INIT, NEXT, NestedKey, next_key, normalize_key
from recurl.mode import ExplorationType
from recurl.modules import (
    MLP,
    Categorical,
    CellModule,
    NormalParamExtractor,
    ObservationNorm,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)
from recurl.recurrence import load_cell
from recurl.trainers.config import NO_CELL, PPOConfig, RunConfig


class FlatObservation(nn.Module):
    """Turns the observations of one step into one vector.

    Images (uint8) are divided by 255, everything is flattened and concatenated in the order of the keys.

    Args:
        spec: observations of the environments, ``[*B]``.

    Shapes:
        one tensor ``[..., *shape]`` per key to ``[..., features]``, float32.

    Example:
        >>> flat = FlatObservation(specs.Composite({"b": specs.Unbounded(2), "a": specs.Unbounded(1, 2)}))
        >>> flat.keys, flat(torch.ones(1, 1, 2), torch.zeros(1, 2))
        (['a', 'b'], tensor([[1., 1., 0., 0.]]))
    """

    def __init__(self, spec: specs.Composite) -> None:
        super().__init__()
        leaves = dict(spec.items(include_nested=True, leaves_only=True))
        self.keys: list[NestedKey] = sorted(leaves, key=str)
        shapes = [leaves[key].shape[len(spec.shape) :] for key in self.keys]
        self._dims = [len(shape) for shape in shapes]
        self.features = sum(shape.numel() for shape in shapes)

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the vector."""
        flat = [_flatten(value, dims) for value, dims in zip(observations, self._dims, strict=True)]
        return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def _flatten(value: Tensor, dims: int) -> Tensor:
    value = value / 255 if value.dtype == torch.uint8 else value.to(torch.float32)
    if dims == 0:
        return value.unsqueeze(-1)
    return value.flatten(-dims) if dims > 1 else value


class Encoder(nn.Module):
    """Flat observation, normalisation, one hidden layer: ``[*B, *shape]`` per key to ``[*B, hidden]``."""

    def __init__(self, flat: FlatObservation, norm: ObservationNorm | None, hidden_size: int) -> None:
        super().__init__()
        self.flat = flat
        self.norm = norm
        self.layer = nn.Linear(flat.features, hidden_size)

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the embedding."""
        flat = self.flat(*observations)
        return torch.tanh(self.layer(flat if self.norm is None else self.norm(flat)))


class Choices(Categorical):
    """Draws the same choices as ``Categorical``, and some choice where a probability is NaN.

    So a batch in which an observation is NaN comes to its end, and the trainer can say where that began. A GPU that
    refused such probabilities would have to be given up.

    Example:
        >>> Choices(logits=torch.full((2, 3), torch.nan)).sample().shape
        torch.Size([2])
    """

    def sample(self, sample_shape: torch.Size | list[int] | tuple[int, ...] = torch.Size()) -> Tensor:  # noqa: B008 - as in torch
        """Draw choices, ``[*sample_shape, *B]`` int64."""
        probs = self.probs.detach().expand(*sample_shape, *self.batch_shape, -1)
        return torch.div(probs, torch.empty_like(probs).exponential_()).max(-1).indices


class Agent(nn.Module):
    """Policy and critic of a run, with a shared trunk or one each.

    Args:
        config: cell, sizes, normalisation.
        observation_spec: observations of the environments, ``[*B]``.
        action_spec: the actions of one environment: ``Categorical`` or ``Bounded``.

    Attributes:
        actor: from observations to actions and their log-probability.
        critic: from observations to ``"state_value"``.
        policy: what has to be run while collecting, so that every hidden state is carried: the actor, and before it
            the critic's trunk when it has its own. See :func:`collecting`.
        flat: turns observations into one vector.
        norm: statistics of these vectors, or None.

    Raises:
        UnsupportedError: the actions are of another kind.
    """

    def __init__(self, config: PPOConfig, observation_spec: specs.Composite, action_spec: specs.TensorSpec) -> None:
        super().__init__()
        self.flat = flat = FlatObservation(observation_spec)
        self.norm = ObservationNorm((flat.features,)) if config.normalize_observations else None
        actor_trunk = make_trunk(config, flat, self.norm, "" if config.shared_trunk else "actor_")
        critic_trunk = actor_trunk if config.shared_trunk else make_trunk(config, flat, self.norm, "critic_")
        actor_head = _actor_head(config.hidden_size, actor_trunk[-1].out_keys[0], action_spec)
        value_head = ValueOperator(
            _initialised(nn.Linear(config.hidden_size, 1), 1.0), in_keys=[critic_trunk[-1].out_keys[0]]
        )
        self.actor = ProbabilisticActor(
            TensorDictSequential(*actor_trunk, actor_head[0]),
            **actor_head[1],
            out_keys=[ACTION],
            return_log_prob=True,
            default_interaction_type=ExplorationType.RANDOM,
        )
        self.critic = TensorDictSequential(*critic_trunk, value_head)
        carried = [] if config.shared_trunk or config.cell == NO_CELL else critic_trunk
        self.policy = TensorDictSequential(*carried, self.actor)


def collecting(policy: TensorDictModuleBase) -> TensorDictSequential:
    """Return ``policy``, writing only what a batch needs: actions, their log-probability, new states."""
    written = [normalize_key(key) for key in policy.out_keys]
    kept = [key for key in written if key in (ACTION, f"{ACTION}_log_prob") or key[0] == NEXT]
    return TensorDictSequential(policy, selected_out_keys=cast(Any, kept))


def make_trunk(
    config: RunConfig, flat: FlatObservation, norm: ObservationNorm | None, prefix: str
) -> list[TensorDictModuleBase]:
    """Return encoder and memory; the keys that they write begin with ``prefix``."""
    encoder = Encoder(flat, norm, config.hidden_size)
    _initialised(encoder.layer, math.sqrt(2))
    embedding, memory = f"{prefix}embedding", f"{prefix}memory"
    encode = TensorDictModule(encoder, in_keys=cast(Any, flat.keys), out_keys=[embedding])
    return [encode, _memory(config, embedding, memory, prefix)]


def _memory(config: RunConfig, embedding: str, memory: str, prefix: str) -> TensorDictModuleBase:
    size = config.hidden_size
    if config.cell == NO_CELL:
        # Two layers through 4 x hidden hold as many weights as an LSTM's two 4 x hidden matrices.
        net = MLP(size, size, num_cells=[4 * size], activate_last_layer=True)
        for layer in net:
            if isinstance(layer, nn.Linear):
                _initialised(layer, math.sqrt(2))
        return TensorDictModule(net, in_keys=[embedding], out_keys=[memory])
    cell = load_cell(config.cell)
    states = [f"{prefix}state_{name}" for name in cell.state_names]
    module = CellModule(
        cell,
        input_size=size,
        hidden_size=size,
        num_layers=config.num_layers,
        in_keys=[embedding, *states, IS_INIT],
        out_keys=[memory, *map(next_key, states)],
        recurrent_backend=config.backend,
    )
    module.net.reset_parameters(for_training=True)
    return module


def _actor_head(size: int, memory: NestedKey, spec: specs.TensorSpec) -> tuple[TensorDictModule, dict[str, Any]]:
    if isinstance(spec, specs.Categorical) and not spec.shape:
        head = TensorDictModule(_initialised(nn.Linear(size, spec.n), 0.01), in_keys=[memory], out_keys=["logits"])
        return head, {"in_keys": ["logits"], "distribution_class": Choices}
    if (
        isinstance(spec, specs.Bounded)
        and len(spec.shape) == 1
        and spec.low.isfinite().all()
        and spec.high.isfinite().all()
    ):
        net = nn.Sequential(_initialised(nn.Linear(size, 2 * spec.shape[0]), 0.01), NormalParamExtractor())
        head = TensorDictModule(net, in_keys=[memory], out_keys=["loc", "scale"])
        bounds = {"low": spec.low, "high": spec.high}
        return head, {"in_keys": ["loc", "scale"], "distribution_class": TanhNormal, "distribution_kwargs": bounds}
    raise UnsupportedError(
        f"PPO needs Discrete actions, or a Box of one dimension with finite bounds, got {spec}: wrap the environment."
    )


def _initialised(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
