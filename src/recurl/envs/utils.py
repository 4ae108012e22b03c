"""Environment utilities: ``step_mdp``, spec checks, policy wiring checks, and exploration types."""

from __future__ import annotations

from tensordict import TensorDictBase

from recurl.core.errors import ArgumentError
from recurl.core.keys import ACTION, COLLECTOR, NEXT, REWARD
from recurl.core.lazy import lazy_names
from recurl.envs.base import EnvBase
from recurl.envs.mdp import step_mdp
from recurl.envs.wiring import check_policy_wiring, policy_transforms, unfed_states
from recurl.sequences.mode import ExplorationType, exploration_type, set_exploration_type

__all__ = [
    "ExplorationType",
    "check_env_specs",
    "check_policy_wiring",
    "exploration_type",
    "policy_transforms",
    "set_exploration_type",
    "step_mdp",
    "unfed_states",
]

lazy_names(__name__)


def check_env_specs(env: EnvBase, max_steps: int = 5) -> None:
    """Check that an environment's resets and steps match its specs: keys, shapes, dtypes, and domains.

    Resets ``env`` and takes up to ``max_steps`` random steps.

    Args:
        env: the environment.
        max_steps: maximum number of steps.

    Raises:
        ArgumentError: an entry does not match its spec.

    Example:
        >>> from recurl.envs import GymEnv
        >>> check_env_specs(GymEnv("CartPole-v1"))
    """
    root = env.reset()
    for _ in range(max_steps):
        _check(env, root, "the root after reset")
        td = env.rand_step(root)
        _check(env, td.get(NEXT), "'next' after step", reward=True)
        root = env.maybe_reset(env.carry(td))
        if not env.action_spec.is_in(td.get(ACTION)):
            raise ArgumentError(f"A random action is not in the action spec {env.action_spec}: {td.get(ACTION)}.")
    fake, real = env.fake_tensordict(), env.rollout(max_steps)[..., 0].exclude(COLLECTOR)
    extra = set(real.keys(True, True)) ^ set(fake.keys(True, True))
    if extra:
        raise ArgumentError(
            f"A rollout must have the entries that the specs declare, but they differ in {sorted(map(str, extra))}."
        )


def _check(env: EnvBase, td: TensorDictBase, where: str, reward: bool = False) -> None:
    specs = {**dict(env.observation_spec.items(True, True)), **dict(env.state_spec.items(True, True))}
    specs.update(env.done_spec.items())
    if reward:
        specs[REWARD] = env.reward_spec
    for key, spec in specs.items():
        value = td.get(key, None)
        if not spec.is_in(value):
            got = "nothing" if value is None else f"{list(value.shape)} {value.dtype}"
            raise ArgumentError(f"{where} must hold {key!r} in {spec}, got {got}: {value}.")
