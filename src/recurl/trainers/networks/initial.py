"""Networks that start from the weights and statistics of another run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor

from recurl.core.errors import ArgumentError
from recurl.core.ranges import flag, shown
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.agent import Agent

__all__ = ["Initial", "take_networks"]

_ACTOR = "actor"
_PASSED_OVER = (_ACTOR, "policy", "explore")  # a policy is made of the others; exploration starts over
_SHAPING = (
    "cell",
    "hidden_size",
    "num_layers",
    "head_width",
    "head_layers",
    "encoder",
    "encoder_width",
    "encoder_layers",
    "image_layout",
    "previous_action",
    "previous_reward",
    "show_action_mask",
    "normalize_observations",
)


class Initial(NamedTuple):
    """Networks of another run, as its checkpoint stores them.

    Attributes:
        path: the checkpoint.
        options: options of the run, as plain values that are never imported.
        actor_kind: see ``RunConfig.actor_kind``; the name of an algorithm that isn't registered.
        algorithm: the part of the algorithm.
    """

    path: str
    options: Mapping[str, Any]
    actor_kind: str
    algorithm: Mapping[str, Any]


def take_networks(agent: Agent, config: RunConfig, initial: Initial) -> tuple[list[str], list[str]]:
    """Copy weights and statistics of another run into an agent: all of its actor, and each other network that fits.

    A network that shares parameters with the actor fits if it shared them in the other run, too.

    Args:
        agent: the networks.
        config: options of their run.
        initial: the other run.

    Returns:
        Names of the networks that were taken, and of those that weren't.

    Raises:
        ArgumentError: the actor doesn't fit; the message names the first option or module that differs.
    """
    saved: dict[str, Tensor] = dict(initial.algorithm["agent"])
    _check_actor(agent, config, initial, saved)
    own = agent.state_dict(keep_vars=True)
    of_actor = {id(value): saved[name] for name, value in own.items() if name.startswith(f"{_ACTOR}.")}
    taken, fresh, copied = [_ACTOR], list[str](), list[str](_names(own, _ACTOR))
    for part, module in agent.named_children():
        if part in _PASSED_OVER or not any(True for _ in module.parameters()):
            continue
        names = _names(own, part)
        shared = [
            (saved[name], of_actor[id(own[name])]) for name in names if name in saved and id(own[name]) in of_actor
        ]
        fits = _difference(own, saved, part) is None and all(torch.equal(*pair) for pair in shared)
        (taken if fits else fresh).append(part)
        copied += names if fits else []
    with torch.no_grad():
        for name in copied:
            own[name].copy_(saved[name])
    return taken, fresh


def _check_actor(agent: Agent, config: RunConfig, initial: Initial, saved: Mapping[str, Tensor]) -> None:
    start = f"--init-from: the actor of {initial.path} doesn't fit this run's"
    kind = config.actor_kind or config.algorithm_name()
    if initial.actor_kind != kind:
        raise ArgumentError(
            f"{start}: it is of {initial.options.get('algorithm')}, whose actor computes something else than that of "
            f"{config.algorithm} ({initial.actor_kind}, and here {kind}). PPO, A2C, IMPALA, SAC and distilled students "
            "can start from each other, DQN and R2D2 too."
        )
    own = agent.state_dict(keep_vars=True)
    difference = _difference(own, saved, _ACTOR)
    options = [name for name in _SHAPING if name in initial.options and initial.options[name] != getattr(config, name)]
    if "cell" in options or (difference is not None and options):
        there, here = initial.options[options[0]], getattr(config, options[0])
        raise ArgumentError(
            f"{start}: {flag(options[0])} is {shown(there)} there and {shown(here)} here. Give both "
            "runs the same networks."
        )
    if difference is None:
        return
    parts = agent.actor.named_modules(prefix=_ACTOR)
    encoder = next(
        name for name, part in parts if type(part) is TensorDictModule
    )  # the first part that isn't a sequence
    what = "observations" if difference.startswith(f"{encoder}.") else "actions"
    shapes = [list(state[difference].shape) if difference in state else "missing" for state in (saved, own)]
    raise ArgumentError(
        f"{start}: {difference.replace('module.', '')} is {shapes[0]} there and {shapes[1]} here, as the "
        f"{what} of the two environments differ ({initial.options.get('env')}, and here {config.env_name})."
    )


def _difference(own: Mapping[str, Any], saved: Mapping[str, Tensor], part: str) -> str | None:
    """Return the name of the first entry of a part that one state lacks, or that has another shape there."""
    names = [*_names(own, part), *_names(saved, part)]
    return next((n for n in names if n not in own or n not in saved or own[n].shape != saved[n].shape), None)


def _names(state: Mapping[str, Any], part: str) -> list[str]:
    return [name for name in state if name.startswith(f"{part}.")]
