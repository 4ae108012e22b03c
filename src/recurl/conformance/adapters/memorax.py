"""Memorax: ``PPO`` with ``RNN(cell=nn.LSTMCell(...))`` in a JAX environment, after its README and its PPO examples."""

# Memorax has an interpreter of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import memorax.algorithms.ppo
import numpy as np
import optax
from gymnax.environments import spaces
from memorax.algorithms import PPO, PPOConfig
from memorax.networks import MLP, RNN, FeatureExtractor, Network, heads
from memorax.utils import generalized_advantage_estimation

from recurl.conformance.adapter import NotOffered, Outputs, Play, Setup
from recurl.conformance.script import ACTIONS, FEATURES, Moment, Script

SIZE = 16
"""Units of the LSTMs, and of the encoders before them."""
MOMENTS = 96
"""Steps of each environment that the arrays hold."""


class Memorax:
    """Memorax, whose environments have Gymnax's interface before 1.0: one flag for all ends."""

    gamma, lmbda = 0.99, 0.95
    documented: Mapping[str, str] = {}

    def __init__(self) -> None:
        self.versions = {name: metadata.version(name) for name in ("memorax", "jax", "flax", "gymnax")}

    def make(self, setup: Setup) -> MemoraxAgent:
        """Create an agent."""
        return MemoraxAgent(setup, self.gamma, self.lmbda)


class MemoraxAgent:
    """Actor and critic with an LSTM each.

    ``train`` collects and updates in one compiled function: :meth:`collect` calls it, and :meth:`learn` accepts the
    parameters that it returned.

    Args:
        setup: how it collects and learns.
        gamma: discount.
        lmbda: parameter of generalized advantage estimation.
    """

    def __init__(self, setup: Setup, gamma: float, lmbda: float) -> None:
        self.setup, self.gamma, self.lmbda = setup, gamma, lmbda
        self.agent = self._agent(setup.script)
        with _scripted(setup.script):
            self.key, self.state = jax.block_until_ready(self.agent.init(jax.random.key(setup.seed)))

    def _agent(self, script: Script) -> PPO:
        config = PPOConfig(
            name="PPO-LSTM",
            num_envs=self.setup.script.num_envs,
            num_eval_envs=script.num_envs,
            num_steps=self.setup.steps,
            gamma=self.gamma,
            gae_lambda=self.lmbda,
            num_minibatches=self.setup.minibatches,
            update_epochs=self.setup.epochs,
            normalize_advantage=True,
            clip_coef=0.2,
            clip_vloss=True,
            ent_coef=0.01,
            vf_coef=0.5,
        )
        actor, critic = _Actor(network(heads.Categorical(ACTIONS))), _Critic(network(heads.VNetwork()))
        optimizer = _optimizer(self.setup.learning_rate)
        return PPO(config, _ScriptedEnv(), None, actor, critic, optimizer, optimizer)

    def collect(self) -> Outputs:
        """Call ``train`` for one update; keep the parameters for :meth:`learn`."""
        before = self.state
        for records in RECORDS.values():
            records.clear()
        # The advantages are a local variable of train, which is compiled.
        with mock.patch.object(memorax.algorithms.ppo, "generalized_advantage_estimation", _estimate):
            steps = self.setup.steps * self.setup.script.num_envs
            self.key, self.updated, batch = self.agent.train(self.key, self.state, steps)
        jax.effects_barrier()
        self.records = {name: list(records) for name, records in RECORDS.items()}
        self.state = self._with_parameters(self.updated, before)
        observations = np.asarray(batch.info["observation"]).reshape(-1, FEATURES)
        entries = (batch.action, batch.log_prob, batch.value, self.records["advantages"][0][0])
        return Outputs(observations, *(np.asarray(entry).reshape(-1) for entry in entries))

    def learn(self) -> list[Outputs]:
        """Accept the last update."""
        self.state = self._with_parameters(self.state, self.updated)
        acted, valued = (  # without those of single steps, of collection
            [record for record in self.records[name] if record[0].shape[1] > 1] for name in ("log_probs", "values")
        )
        return [
            Outputs(observations, actions, log_probs, values[..., 0])
            for (observations, actions, log_probs), (_, values) in zip(acted, valued, strict=True)
        ]

    @staticmethod
    def _with_parameters(state: Any, other: Any) -> Any:
        return state.replace(
            actor_params=other.actor_params,
            critic_params=other.critic_params,
            actor_optimizer_state=other.actor_optimizer_state,
            critic_optimizer_state=other.critic_optimizer_state,
        )

    def play(self, script: Script, steps: int) -> Outputs:
        """Call ``evaluate``."""
        with _scripted(script):
            _, batch = jax.block_until_ready(self._agent(script).evaluate(self.key, self.state, num_steps=steps))
        return Outputs(np.asarray(batch.info["observation"]), np.asarray(batch.action))

    def save(self, path: Path) -> None:
        """Raise: there are no checkpoints."""
        raise NotOffered("it saves no checkpoints")

    def load(self, path: Path) -> None:
        """Raise: there are no checkpoints."""
        raise NotOffered("it saves no checkpoints")

    def export(self, path: Path) -> Play:
        """Raise: there is no export."""
        raise NotOffered("it has no export")

    def close(self) -> None:
        """Do nothing."""


def network(head: Any) -> Network:
    """Create an encoder, an LSTM and a head."""
    encoder = FeatureExtractor(observation_extractor=MLP(features=(SIZE,)))
    return Network(encoder, RNN(cell=nn.LSTMCell(features=SIZE)), head)


RECORDS: dict[str, list[tuple[Any, ...]]] = {"log_probs": [], "values": [], "advantages": []}
"""What a compiled function computed."""


def record(name: str, *arrays: Any) -> None:
    """Append arrays of a compiled function to the records whenever it runs."""

    def append(*found: Any) -> None:
        RECORDS[name].append(tuple(np.asarray(each).copy() for each in found))

    jax.debug.callback(append, *arrays, ordered=True)


def _estimate(*arguments: Any) -> Any:
    found = generalized_advantage_estimation(*arguments)
    record("advantages", found[0])
    return found


@cache
def _optimizer(learning_rate: float) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))


@dataclass(frozen=True)
class _Network:
    """A network, whose outputs its subclasses record. Equal ones share compiled functions."""

    network: Network

    @property
    def head(self) -> Any:
        return self.network.head

    def init(self, *arguments: Any, **options: Any) -> Any:
        return self.network.init(*arguments, **options)

    def initialize_carry(self, *arguments: Any) -> Any:
        return self.network.initialize_carry(*arguments)


class _Critic(_Network):
    def apply(self, *arguments: Any, **options: Any) -> Any:
        carry, (values, aux) = self.network.apply(*arguments, **options)
        record("values", options["observation"], values)
        return carry, (values, aux)


class _Actor(_Network):
    def apply(self, *arguments: Any, **options: Any) -> Any:
        carry, (probs, aux) = self.network.apply(*arguments, **options)
        return carry, (_Distribution(probs, options["observation"]), aux)


class _Distribution:
    """A distribution whose log-probabilities are recorded."""

    def __init__(self, distribution: Any, observations: Any) -> None:
        self._distribution, self._observations = distribution, observations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distribution, name)

    def log_prob(self, actions: Any) -> Any:
        found = self._distribution.log_prob(actions)
        record("log_probs", self._observations, actions, found)
        return found


class _State(NamedTuple):
    """State of an environment: its script, observations ``[M, 3]``, rewards ``[M]`` and ends ``[M]``, and the step."""

    observations: Any
    rewards: Any
    ends: Any
    time: Any


@dataclass(frozen=True)
class _ScriptedEnv:
    """A script with Gymnax's interface before 1.0: a step that ends an episode returns the next one's observation."""

    def reset(self, key: Any, params: Any) -> tuple[Any, _State]:
        shapes = (((MOMENTS, FEATURES), np.float32), ((MOMENTS,), np.float32), ((MOMENTS,), np.bool_))
        arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        # Arrays of the script as inputs instead of constants: agents with other scripts share compiled functions.
        script: Any = jax.pure_callback(_arrays, arrays, _row(key), vmap_method="broadcast_all")
        observations, rewards, ends = script
        return observations[0], _State(observations, rewards, ends, jnp.int32(0))

    def step(self, key: Any, state: _State, action: Any, params: Any) -> tuple[Any, _State, Any, Any, dict[str, Any]]:
        time = state.time
        info = {"observation": state.observations[time]}
        following = state._replace(time=time + 1)
        return state.observations[time + 1], following, state.rewards[time], state.ends[time], info

    def action_space(self, params: Any) -> spaces.Discrete:
        return spaces.Discrete(ACTIONS)


_SCRIPTS: list[Script] = []


@contextmanager
def _scripted(script: Script) -> Generator[None]:
    """Let environments that are reset follow a script."""
    _SCRIPTS.append(script)
    try:
        yield
    finally:
        _SCRIPTS.pop()


def _arrays(rows: Any) -> list[Any]:
    script = _SCRIPTS[-1]
    walks = [list(script.walk(int(row), MOMENTS)) for row in np.ravel(rows)]
    found = (
        np.array([[script.observation(place) for place in walk] for walk in walks], np.float32),
        np.array([[script.reward(place) for place in walk] for walk in walks], np.float32),
        np.array([[_ends(script, place) for place in walk] for walk in walks]),
    )
    return [each.reshape(*np.shape(rows), *each.shape[1:]) for each in found]


def _ends(script: Script, place: Moment) -> bool:
    return place.step + 1 == script.length(place.row, place.episode)


@jax.custom_batching.custom_vmap
def _row(key: Any) -> Any:
    """Return the index of an environment in the batch."""
    return jnp.int32(0)


@_row.def_vmap
def _(axis_size: int, in_batched: Any, key: Any) -> tuple[Any, bool]:
    return jnp.arange(axis_size, dtype=jnp.int32), True
