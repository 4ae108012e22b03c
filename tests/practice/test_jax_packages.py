"""Environments of other packages written in JAX, by name: states restored exactly, trained, and resumed.

Each runs where its package is installed: xminigrid by ``make setup``, others by ``make practice``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from recurl.envs import JaxEnv, check_env_specs
from tests.trainers.resumes import assert_resumes_bit_for_bit, small

pytest.importorskip("jax")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves"), pytest.mark.filterwarnings("ignore")]

NAMES = {"xminigrid": "jax:xland/MiniGrid-Empty-5x5", "brax": "jax:brax/inverted_pendulum"}
INSTALLED = [name for module, name in NAMES.items() if find_spec(module)]


def episodes(env: JaxEnv, root, steps: int):
    """Return the last step, and the entries after each of ``steps`` steps with actions that depend on their number."""
    found = []
    for index in range(steps):
        torch.manual_seed(index)
        root = env.step(env.rand_action(root))
        found.append(root["next"].clone())
        root = env.maybe_reset(env.carry(root))
    return root, torch.stack(found)


def test_the_package_of_the_setup_is_installed() -> None:
    assert find_spec("xminigrid")


@pytest.mark.parametrize("name", INSTALLED)
def test_steps_and_saved_states(name: str) -> None:
    from recurl.envs.jax_named import named_jax_env

    env = named_jax_env(name, 4, max_steps=20)
    check_env_specs(env)
    root, _ = episodes(env, env.reset(seed=1), 13)
    state, kept = env.get_state(), root.clone()
    _, expected = episodes(env, root, 12)
    assert (expected["truncated"] | expected["terminated"]).flatten(1).any(0).all()
    assert not (expected["truncated"] & expected["terminated"]).any()
    env.reset(seed=2)
    env.set_state(state)
    _, found = episodes(env, kept, 12)
    assert (found == expected).all()


@pytest.mark.parametrize("name", INSTALLED)
def test_a_resumed_run_is_the_run_that_was_left_alone(name: str, tmp_path: Path) -> None:
    assert_resumes_bit_for_bit(small(env=name), tmp_path)
