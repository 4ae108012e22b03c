"""Playing the episodes of a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recurl.conformance.adapter import Outputs
from recurl.conformance.script import Script


def play_steps(script: Script, steps: int, predict: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Outputs:
    """Step through the episodes of a script with a function like the ``predict`` of Stable-Baselines3.

    Args:
        script: the environments.
        steps: number of steps of each.
        predict: returns actions ``[N]`` and the next state, given observations ``[N, 3]``, the state (at first None),
            and whether an episode begins, bool ``[N]``.
    """
    envs = [script.make(row) for row in range(script.num_envs)]
    observation = np.stack([env.reset()[0] for env in envs])
    starts, state = np.ones(len(envs), bool), None
    seen: list[Any] = []
    taken: list[Any] = []
    for _ in range(steps):
        action, state = predict(observation, state, starts)
        seen.append(observation)
        taken.append(np.asarray(action).reshape(len(envs)))
        results = [env.step(choice) for env, choice in zip(envs, taken[-1], strict=True)]
        starts = np.array([result[2] or result[3] for result in results])
        observation = np.stack(
            [env.reset()[0] if end else result[0] for env, end, result in zip(envs, starts, results, strict=True)]
        )
    return Outputs(np.stack(seen), np.stack(taken))
