"""Actor and critic of one's own as the networks of a run."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential

from recurl.core import specs
from recurl.core.errors import ArgumentError
from recurl.core.keys import ACTION, STATE_VALUE, normalize_key
from recurl.execution.lowering import modules_in_order
from recurl.modules import ProbabilisticActor
from recurl.modules.recurrent import RecurrentModule
from recurl.modules.rsl_rl import JoinedObservations
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.actor_critic import ActorCritic
from recurl.trainers.networks.agent import Agent


class OwnActorCritic(ActorCritic):
    """Actor and critic that were built elsewhere, such as by :func:`recurl.modules.rsl_rl.from_rsl_rl`.

    A subclass of ``PPO``, ``A2C`` or ``Impala`` returns them from ``make_agent``. The options of networks and
    ``normalize_observations`` then have no effect, except that ``cell`` and the sizes are those by which the device and
    the number of environments are chosen. Statistics of :class:`~recurl.modules.rsl_rl.JoinedObservations` are updated
    after each update of the networks.

    Args:
        config: see :class:`Agent`.
        observation_spec: see :class:`Agent`.
        actor: policy that writes ``"action"`` and ``"action_log_prob"``.
        critic: critic that writes ``"state_value"``. Modules shared with the actor come first in both.

    Raises:
        ArgumentError: an entry is not written.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> from recurl.envs import TensorEnv
        >>> from recurl.envs.tasks import MaskedArm
        >>> from recurl.modules import IndependentNormal, LearnedScale, ProbabilisticActor, ValueOperator
        >>> from recurl.trainers import PPOConfig
        >>> net = nn.Sequential(nn.Linear(6, 2), LearnedScale(2))
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        ...     ["loc", "scale"],
        ...     distribution_class=IndependentNormal,
        ...     return_log_prob=True,
        ... )
        >>> env = TensorEnv(MaskedArm(), 4)
        >>> config = PPOConfig(env=env, num_envs=4, cell="none", normalize_observations=False)
        >>> agent = OwnActorCritic(config, env.observation_spec, actor, ValueOperator(nn.Linear(6, 1)))
        >>> agent.policy.out_keys[-2:]
        ['action', 'action_log_prob']
    """

    def __init__(
        self,
        config: RunConfig,
        observation_spec: specs.Composite,
        actor: ProbabilisticActor,
        critic: TensorDictModuleBase,
    ) -> None:
        Agent.__init__(self, config, observation_spec)
        for network, name, keys in (
            (actor, "actor", (ACTION, f"{ACTION}_log_prob")),
            (critic, "critic", (STATE_VALUE,)),
        ):
            written = list(map(normalize_key, network.out_keys))
            missing = [key for key in keys if key not in written]
            if missing:
                raise ArgumentError(f"The {name} must write {missing}, and writes {written}.")
        shared = modules_in_order(actor)
        own = [part for part in modules_in_order(critic) if not any(part is other for other in shared)]
        memories = [place for place, part in enumerate(own) if isinstance(part, RecurrentModule)]
        self.actor = actor
        self.critic = TensorDictSequential(critic)
        self.policy = TensorDictSequential(*own[: memories[-1] + 1 if memories else 0], actor)

    def observe(self, batch: TensorDictBase) -> None:
        """Update the running statistics with the observations of a batch ``[*B]``."""
        parts = [*modules_in_order(self.actor), *modules_in_order(self.critic)]
        for part in dict.fromkeys(parts):
            if isinstance(part, TensorDictModule) and isinstance(part.module, JoinedObservations):
                part.module.update(*(batch[key] for key in part.in_keys))
