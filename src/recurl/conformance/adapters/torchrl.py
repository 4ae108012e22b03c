"""TorchRL: its recurrent PPO of *Recurrent state lifecycle*, with minibatches of rows as in its Isaac Lab example."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import tensordict
import torch
import torchrl
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import (
    BatchSizeTransform,
    ExplorationType,
    GymWrapper,
    InitTracker,
    SerialEnv,
    TransformedEnv,
    set_exploration_type,
)
from torchrl.modules import LSTMModule, OneHotCategorical, ProbabilisticActor, ValueOperator, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from recurl.conformance.adapter import Outputs, Play, Setup
from recurl.conformance.playing import play_steps
from recurl.conformance.script import ACTIONS, FEATURES, Script

SIZE = 16


class TorchRL:
    """TorchRL."""

    gamma, lmbda = 0.99, 0.95
    documented: Mapping[str, str] = {}
    no_agents = "its LSTMModule refuses observations with a dimension of agents"

    def __init__(self) -> None:
        self.versions = {
            "torchrl": torchrl.__version__,
            "tensordict": tensordict.__version__,
            "torch": torch.__version__,
        }

    def make(self, setup: Setup) -> TorchRLAgent:
        """Create an agent."""
        return TorchRLAgent(setup, self.gamma, self.lmbda)


class TorchRLAgent:
    """An LSTM for the actor and one for the critic.

    Args:
        setup: how it collects and learns.
        gamma: discount.
        lmbda: parameter of generalized advantage estimation.
    """

    def __init__(self, setup: Setup, gamma: float, lmbda: float) -> None:
        self.setup = setup
        rows, env = setup.script.num_envs, environments(setup.script)
        torch.manual_seed(setup.seed)  # after environments were created, which may draw random numbers
        self.memory = memory("actor")
        linear = nn.Linear(SIZE, ACTIONS, bias=False)
        nn.init.orthogonal_(linear.weight, 10)  # greedy actions depend on the memory
        self.head = TensorDictModule(linear, in_keys=["actor_features"], out_keys=["logits"])
        self.actor = ProbabilisticActor(
            TensorDictSequential(self.memory, self.head),
            in_keys=["logits"],
            out_keys=["action"],
            spec=env.action_spec_unbatched,
            distribution_class=OneHotCategorical,
            return_log_prob=True,
        )
        critic_head = ValueOperator(nn.Linear(SIZE, 1), in_keys=["critic_features"])
        self.critic = TensorDictSequential(memory("critic"), critic_head)
        self.collector = Collector(
            env,
            TensorDictSequential(self.actor, self.critic),
            frames_per_batch=rows * setup.steps,
            total_frames=-1,
            auto_register_policy_transforms=True,
        )
        self.batches = iter(self.collector)
        self.gae = GAE(gamma=gamma, lmbda=lmbda, value_network=self.critic, deactivate_vmap=True)
        self.loss = ClipPPOLoss(self.actor, self.critic, clip_epsilon=0.2, entropy_coeff=0.0, normalize_advantage=True)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=setup.learning_rate)
        self.buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(rows),
            sampler=SamplerWithoutReplacement(),
            batch_size=rows // setup.minibatches,
        )
        self.distribution: Any = None
        self.values: Any = None
        self._watch(self.actor)

    def _watch(self, actor: Any) -> None:
        """Keep what the loss gets of the actor, and of the critic."""
        get_dist = actor.get_dist

        def distribution(batch: TensorDictBase, *args: Any, **options: Any) -> Any:
            self.distribution = get_dist(batch, *args, **options)
            return self.distribution

        def valued(module: nn.Module, args: Any, output: TensorDictBase) -> None:
            self.values = output["state_value"].detach().clone()

        actor.get_dist = distribution
        self.critic.register_forward_hook(valued)

    def collect(self) -> Outputs:
        """Collect a batch ``[N, T]`` and estimate its advantages."""
        batch = next(self.batches)
        acted = batch["state_value"].clone()
        self.batch = batch.exclude("state_value")
        self._estimate()
        return outputs(batch, batch["action_log_prob"].clone(), acted, self.batch["advantage"].clone())

    def _estimate(self) -> None:
        with set_recurrent_mode(True), torch.no_grad():
            self.gae(self.batch)

    def learn(self) -> list[Outputs]:
        """Estimate the advantages in every epoch, and descend the loss over minibatches of rows."""
        found: list[Outputs] = []
        for _ in range(self.setup.epochs):
            self._estimate()
            self.buffer.empty()
            self.buffer.extend(self.batch)
            for minibatch in self.buffer:
                with set_recurrent_mode(True):
                    losses = self.loss(minibatch)
                log_probs = self.distribution.log_prob(minibatch["action"]).detach()
                found.append(outputs(minibatch, log_probs, self.values))
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return found

    def play(self, script: Script, steps: int) -> Outputs:
        """Step deterministically with ``rollout``."""
        env = TransformedEnv(environments(script), InitTracker())
        env.append_transform(self.memory.make_tensordict_primer())
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            return outputs(env.rollout(steps, self.actor, break_when_any_done=False))

    def save(self, path: Path) -> None:
        """Save the parameters."""
        torch.save(self.loss.state_dict(), path)

    def load(self, path: Path) -> None:
        """Load parameters; collection goes on."""
        self.loss.load_state_dict(torch.load(path))

    def export(self, path: Path) -> Play:
        """Export with ``torch.export``, as in the tutorial *Exporting TorchRL modules*."""
        policy = TensorDictSequential(
            BatchSizeTransform(reshape_fn=lambda batch: batch.unsqueeze(0)),
            deepcopy(self.memory).make_python_based(),  # which changes it in place
            *deepcopy([self.head, self.actor[-1]]),
            BatchSizeTransform(reshape_fn=lambda batch: batch.squeeze(0)),
        ).select_out_keys("action", ("next", "actor_h"), ("next", "actor_c"))
        path, state = path.with_suffix(".pt2"), torch.zeros(2, 1, SIZE)
        example = dict(zip(policy.in_keys, (torch.zeros(FEATURES), *state, torch.tensor(True)), strict=True))
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            torch.export.save(torch.export.export(policy, args=(), kwargs=example, strict=False), path)
        exported = torch.export.load(path).module()

        def step(observation: Any, state: Any, start: Any) -> tuple[Any, Any]:
            entries = (torch.as_tensor(observation), *state, torch.as_tensor(start))
            action, *state = exported(**dict(zip(example, entries, strict=True)))
            return action.argmax(-1), state

        def predict(observations: Any, states: Any, starts: Any) -> tuple[Any, Any]:
            states = states or [state] * len(observations)
            steps = [step(*row) for row in zip(observations, states, starts, strict=True)]
            return [action for action, _ in steps], [state for _, state in steps]

        def play(script: Script, steps: int) -> Outputs:
            return play_steps(script, steps, predict)

        return play

    def close(self) -> None:
        """Shut the collector down."""
        self.collector.shutdown()


def memory(name: str) -> LSTMModule:
    """Create an LSTM over the observations."""
    return LSTMModule(
        input_size=FEATURES,
        hidden_size=SIZE,
        in_keys=["observation", f"{name}_h", f"{name}_c", "is_init"],
        out_keys=[f"{name}_features", ("next", f"{name}_h"), ("next", f"{name}_c")],
    )


def environments(script: Script) -> SerialEnv:
    """Create the environments of a script."""
    return SerialEnv(script.num_envs, [partial(environment, script, row) for row in range(script.num_envs)])


def environment(script: Script, row: int) -> GymWrapper:
    """Create one of the environments."""
    return GymWrapper(script.make(row))


def outputs(batch: TensorDictBase, log_probs: Any = None, values: Any = None, advantages: Any = None) -> Outputs:
    """Return the outputs of a batch."""
    return Outputs(batch["observation"].clone(), batch["action"].argmax(-1), log_probs, values, advantages)
