"""skrl: ``PPO_RNN`` with the LSTM models of its example ``torch_gymnasium_pendulumnovel_ppo_lstm.py``."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from skrl.agents.torch.ppo import PPO_CFG, PPO_RNN
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import nn

from recurl.conformance.adapter import NotOffered, Outputs, Play, Setup
from recurl.conformance.script import ACTIONS, FEATURES, Script

HIDDEN = 16
"""Size of the memory."""


class Skrl:
    """skrl, with the vector environments of its example: those of ``gymnasium.make_vec``, which reset in the next step.

    Attributes:
        autoreset: when an ended environment is reset.
        ends: what the models take for the end of an episode inside a sequence, as their documentation does.
        time_limit_bootstrap: the option of ``PPO_CFG`` that bootstraps at truncations.
        shared: whether one model is policy and value.
    """

    gamma, lmbda = 0.99, 0.95
    documented: Mapping[str, str] = {}
    no_agents = "its IPPO and MAPPO aren't recurrent"
    autoreset = AutoresetMode.NEXT_STEP
    ends: tuple[str, ...] = ("terminated",)
    time_limit_bootstrap = True
    shared = False

    def __init__(self) -> None:
        self.versions = {name: version(name) for name in ("skrl", "torch", "gymnasium")}

    def make(self, setup: Setup) -> SkrlAgent:
        """Create an agent."""
        return SkrlAgent(setup, self)


class SkrlSameStep(Skrl):
    """skrl, with environments that reset in the same step, as those of Isaac Lab do."""

    autoreset = AutoresetMode.SAME_STEP


class SkrlShared(SkrlSameStep):
    """skrl, as it passes most checks: policy and value are one model, whose memory ends at truncations too."""

    ends = ("terminated", "truncated")
    shared = True


class SkrlAgent:
    """Policy and value with an LSTM each, in environments of a script.

    Args:
        setup: how it collects and learns.
        adapter: the adapter, which has the options.
    """

    def __init__(self, setup: Setup, adapter: Skrl) -> None:
        self.setup, self.adapter = setup, adapter
        set_seed(setup.seed)
        self.agent, self.trainer = self._build(setup.script, setup.steps)
        self.pending: dict[str, Any] = {}

    def _build(self, script: Script, steps: int) -> tuple[PPO_RNN, SequentialTrainer]:
        setup, adapter = self.setup, self.adapter
        if script.num_envs > 1:
            makers = [partial(script.make, row) for row in range(script.num_envs)]
            env = wrap_env(SyncVectorEnv(makers, autoreset_mode=adapter.autoreset), verbose=False)
        else:
            env = wrap_env(script.make(0), verbose=False)  # as the example does
        spaces: dict[str, Any] = {
            "observation_space": env.observation_space,
            "state_space": env.state_space,
            "action_space": env.action_space,
            "device": env.device,
        }
        memory = RandomMemory(memory_size=setup.steps, num_envs=env.num_envs, device=env.device)
        recurrence = {"num_envs": env.num_envs, "sequence_length": min(32, setup.steps), "ends": adapter.ends}
        models: dict[str, Model] = {}
        if adapter.shared:
            models["policy"] = models["value"] = Both(**spaces, **recurrence)
        else:
            models["policy"] = Policy(**spaces, **recurrence)
            models["value"] = Value(**spaces, **recurrence)
        cfg = PPO_CFG()
        cfg.rollouts = setup.steps
        cfg.learning_epochs = setup.epochs
        cfg.mini_batches = setup.minibatches
        cfg.learning_rate = setup.learning_rate
        cfg.discount_factor = adapter.gamma
        cfg.gae_lambda = adapter.lmbda
        cfg.time_limit_bootstrap = adapter.time_limit_bootstrap
        cfg.experiment.write_interval = 0
        cfg.experiment.checkpoint_interval = 0
        agent = PPO_RNN(models=models, memory=memory, cfg=cfg, **spaces)
        config = {
            "timesteps": steps,
            "headless": True,
            "disable_progressbar": True,
            "close_environment_at_exit": False,
        }
        return agent, SequentialTrainer(cfg=config, env=env, agents=agent)

    def collect(self) -> Outputs:
        """Train for as many steps as a rollout has, whose update waits for :meth:`learn`.

        ``update`` computes the advantages: here that of a copy of the agent; those returned are before normalization.
        """
        agent = self.agent
        agent.update = self.pending.update  # keeps its arguments
        try:
            self.trainer.train()
        finally:
            del agent.update
        other = copy.deepcopy(agent)
        with torch.random.fork_rng(devices=[]):
            self._update(other)
        targets: Any = other.memory
        returns, values = (targets.get_tensor_by_name(name)[..., 0] for name in ("returns", "values"))
        memory: Any = agent.memory
        kept = {name: memory.get_tensor_by_name(name).clone() for name in memory.get_tensor_names()}
        return Outputs(
            kept["observations"],
            kept["actions"][..., 0],
            kept["log_prob"][..., 0],
            kept["values"][..., 0],
            returns - values,
        )

    def _update(self, agent: PPO_RNN) -> None:
        agent.enable_models_training_mode(True)  # as `post_interaction` does
        agent.update(**self.pending)
        agent.enable_models_training_mode(False)

    def learn(self) -> list[Outputs]:
        """Update, watching what the models return to it."""
        found: list[Outputs] = []
        parts: list[Any] = []
        policy, value = self.agent.models["policy"], self.agent.models["value"]
        act, predict = policy.act, value.act

        def watched(inputs: dict[str, Any], *, role: str = "") -> Any:
            result = (predict if role == "value" else act)(inputs, role=role)
            if role == "policy":
                parts.extend([inputs["observations"], inputs["taken_actions"][:, 0], result[1]["log_prob"][:, 0]])
            elif parts:  # its first values are those after the rollout
                found.append(Outputs(*(part.detach().clone() for part in [*parts, result[0][:, 0]])))
                parts.clear()
            return result

        policy.act = value.act = watched
        try:
            self._update(self.agent)
        finally:
            del policy.act
            if value is not policy:
                del value.act
        return found

    def play(self, script: Script, steps: int) -> Outputs:
        """Load the agent into another one and evaluate it with its trainer, as the example does."""
        agent, trainer = self._build(script, steps)
        with tempfile.TemporaryDirectory() as folder:
            self.agent.save(str(Path(folder, "agent.pt")))
            agent.load(str(Path(folder, "agent.pt")))
        seen: list[Any] = []
        taken: list[Any] = []
        record = agent.record_transition

        def watched(*, observations: torch.Tensor, actions: torch.Tensor, **others: Any) -> None:
            seen.append(observations.clone())
            taken.append(actions[:, 0].clone())
            record(observations=observations, actions=actions, **others)

        agent.record_transition = watched
        trainer.eval()
        trainer.env.close()
        return Outputs(torch.stack(seen), torch.stack(taken))

    def save(self, path: Path) -> None:
        """Save the agent."""
        self.agent.save(str(path))

    def load(self, path: Path) -> None:
        """Load an agent."""
        self.agent.load(str(path))

    def export(self, path: Path) -> Play:
        """Refuse: there is none."""
        raise NotOffered("skrl exports no policies")

    def close(self) -> None:
        """Close the environments."""
        self.trainer.env.close()


class Recurrent(Model):
    """An LSTM and a small network, as the documentation of skrl's recurrent models describes them.

    Args:
        num_envs: number of environments.
        sequence_length: length of the sequences of an update.
        ends: names of the signals after which a sequence goes on without memory.
        spaces: arguments of ``Model``.
    """

    def __init__(self, num_envs: int, sequence_length: int, ends: tuple[str, ...], **spaces: Any) -> None:
        super().__init__(**spaces)
        self.num_envs, self.sequence_length, self.ends = num_envs, sequence_length, ends
        self.lstm = nn.LSTM(FEATURES, HIDDEN, batch_first=True)

    def get_specification(self) -> dict[str, Any]:
        """Return length and sizes, as ``PPO_RNN`` asks."""
        return {"rnn": {"sequence_length": self.sequence_length, "sizes": [(1, self.num_envs, HIDDEN)] * 2}}

    def memory(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the LSTM's output ``[N, 16]`` and its last states."""
        length = self.sequence_length if self.training else 1
        sequences = inputs["observations"].view(-1, length, FEATURES)
        states = [state.view(1, -1, length, HIDDEN)[:, :, 0].contiguous() for state in inputs["rnn"]]
        ended = torch.zeros(sequences.shape[:2], dtype=torch.bool)
        for name in self.ends:
            if self.training and inputs.get(name) is not None:
                ended |= inputs[name].view(-1, length)
        cuts = [*(ended[:, :-1].any(0).nonzero()[:, 0] + 1).tolist(), length]
        pieces: list[torch.Tensor] = []
        begin = 0
        for end in cuts:
            piece, states = self.lstm(sequences[:, begin:end], tuple(states))
            pieces.append(piece)
            states = [state * ~ended[:, end - 1 : end] for state in states]
            begin = end
        return torch.cat(pieces, 1).flatten(0, 1), states


def value_head() -> nn.Sequential:
    """Return the network of a value."""
    return nn.Sequential(nn.Linear(HIDDEN, 16), nn.ReLU(), nn.Linear(16, 1))


def policy_head() -> nn.Linear:
    """Return the layer of a policy, initialized such that greedy actions depend on the memory."""
    layer = nn.Linear(HIDDEN, ACTIONS, bias=False)
    nn.init.orthogonal_(layer.weight, 10)
    return layer


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Return greedy actions ``[N, 1]``.

    A trainer evaluates with ``mean_actions``, which ``CategoricalMixin`` doesn't return: the models do.
    """
    return logits.argmax(-1, keepdim=True)


class Policy(CategoricalMixin, Recurrent):
    """The policy.

    Args:
        arguments: those of :class:`Recurrent`.
    """

    def __init__(self, **arguments: Any) -> None:
        Recurrent.__init__(self, **arguments)
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = policy_head()

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride] - the mixins pass `role` by position
        self, inputs: dict[str, Any], role: str = ""
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return logits."""
        memory, states = self.memory(inputs)
        logits = self.net(memory)
        return logits, {"rnn": states, "mean_actions": likeliest(logits)}


class Value(DeterministicMixin, Recurrent):
    """The value.

    Args:
        arguments: those of :class:`Recurrent`.
    """

    def __init__(self, **arguments: Any) -> None:
        Recurrent.__init__(self, **arguments)
        DeterministicMixin.__init__(self)
        self.net = value_head()

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride] - the mixins pass `role` by position
        self, inputs: dict[str, Any], role: str = ""
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return values."""
        memory, states = self.memory(inputs)
        return self.net(memory), {"rnn": states}


class Both(CategoricalMixin, DeterministicMixin, Recurrent):
    """Policy and value with one LSTM, as in skrl's examples of shared models.

    Args:
        arguments: those of :class:`Recurrent`.
    """

    def __init__(self, **arguments: Any) -> None:
        Recurrent.__init__(self, **arguments)
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        DeterministicMixin.__init__(self)
        self.policy_net, self.value_net = policy_head(), value_head()

    def act(self, inputs: dict[str, Any], *, role: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
        """Act, or return values."""
        mixins: dict[str, Callable[..., Any]] = {"policy": CategoricalMixin.act, "value": DeterministicMixin.act}
        return mixins[role](self, inputs, role=role)

    def compute(  # pyright: ignore[reportIncompatibleMethodOverride] - the mixins pass `role` by position
        self, inputs: dict[str, Any], role: str = ""
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return logits or values."""
        memory, states = self.memory(inputs)
        if role == "value":
            return self.value_net(memory), {"rnn": states}
        logits = self.policy_net(memory)
        return logits, {"rnn": states, "mean_actions": likeliest(logits)}
