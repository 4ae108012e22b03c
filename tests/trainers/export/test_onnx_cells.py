"""ONNX files of every cell: over a rollout, onnxruntime computes the actions and states of the policy."""

from itertools import cycle

import numpy as np
import onnxruntime
import pytest
import torch

import tests.envs.masked
import tests.trainers.sights  # noqa: F401 - both register environments
from recurl.envs import set_exploration_type
from recurl.recurrence import CELLS, load_cell
from recurl.sequences.mode import ExplorationType
from recurl.trainers import PPOConfig, SACConfig, export_run, load_agent, make_env
from recurl.trainers.export.policy_step import PolicyStep
from recurl.trainers.export.verification import rows_on_cpu
from tests.trainers.sights import PARTS
from tests.trainers.small_runs import trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves", "brief_verification")]

STEPS = 120
KINDS = {
    "discrete": (PPOConfig, "recurl/MaskedCartPole-v1", {"previous_action": True, "previous_reward": True}),
    "continuous": (SACConfig, "Pendulum-v1", {"num_layers": 2}),
    "masked": (PPOConfig, "RecurlTest/Masked-v0", {}),
    "entries": (PPOConfig, PARTS, {"drop_observations": ("mission",), "normalize_observations": True}),
}
# A file takes seconds to write: here each cell with one kind of task, and each kind of task with two or three.
BRIEF = list(zip(CELLS, cycle(KINDS), strict=False))


def rollout(policy, env, function):
    """Return the actions and states of ``policy`` and of ``function`` over a rollout; each carries its own states."""
    draws = torch.Generator().manual_seed(0)
    root, carried, places = env.reset(), None, len(policy.observations) + 1
    pairs = []
    for _ in range(STEPS):
        rows = rows_on_cpu(root)
        rows.set("is_init", rows.get("is_init") | (torch.rand(len(rows), 1, generator=draws) < 0.05))
        arguments = policy.arguments(rows)
        carried = arguments[places:] if carried is None else carried
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            step = policy.actor(rows)
        action, *carried = function((*arguments[:places], *carried))
        pairs += zip((action, *carried), policy.results(step), strict=True)
        _, root = env.step_and_maybe_reset(step.reshape(env.batch_size))
    return pairs


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        *BRIEF,
        *(
            pytest.param(cell, kind, marks=pytest.mark.full)
            for cell in CELLS
            for kind in KINDS
            if (cell, kind) not in BRIEF
        ),
    ],
)
def test_a_rollout_in_onnx_is_that_of_the_policy(tmp_path, cell, kind):
    algorithm, env, options = KINDS[kind]
    folder = trained(tmp_path, algorithm, env, {"cell": cell, **options})
    session = onnxruntime.InferenceSession(export_run(folder, "onnx"))
    config, agent = load_agent(folder)
    policy = PolicyStep(agent.actor)
    names = [value.name for value in session.get_inputs()]
    assert names == policy.inputs
    assert names.index("is_init") == len(policy.observations)
    assert [value.name for value in session.get_outputs()][1:] == [
        f"next.{name}" for name in names[-len(policy.states) :]
    ]

    def function(arguments):
        feed = {name: value.numpy() for name, value in zip(names, arguments, strict=True)}
        return list(map(torch.from_numpy, session.run(None, feed)))

    # Cells with matrices norm small sums of large terms, which multiplies rounding.
    rounding = 1e-4 if load_cell(cell).states_at_ends else 1e-5
    with make_env(config, 3, policy=agent.actor) as envs:
        envs.set_seed(0)
        for found, expected in rollout(policy, envs, function):
            np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=rounding, atol=rounding)
