"""Batches collected with a small recurrent policy, and its features recomputed on samples of them."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.collectors import Collector
from recurl.envs import GymEnv
from recurl.modules import CellModule, set_recurrent_mode
from recurl.recurrence import CELLS
from tests.own_cells import OWN, VARIANTS

KNOWN = CELLS | OWN | VARIANTS

OBSERVATIONS, HIDDEN = 4, 6


def make_policy(cell="lstm", backend="loop"):
    """A policy that writes its features and acts on them; trajectories on CartPole have at least 9 or 10 steps."""
    states = KNOWN[cell].state_names
    module = CellModule(
        KNOWN[cell],
        OBSERVATIONS,
        HIDDEN,
        in_keys=["observation", *states],
        out_keys=["features", *(("next", key) for key in states)],
        recurrent_backend=backend,
    )
    head = TensorDictModule(torch.nn.Linear(HIDDEN, 2), in_keys=["features"], out_keys=["logits"])
    choose = TensorDictModule(lambda x: (x + torch.randn_like(x)).argmax(-1), in_keys=["logits"], out_keys=["action"])
    return TensorDictSequential(module, head, choose)


def make_collector(policy, rows=None, frames=64):
    env = GymEnv("CartPole-v1", num_envs=rows, categorical_action_encoding=True)
    env.set_seed(0)
    return Collector(env, policy, frames_per_batch=frames)


def recomputed(policy, sample):
    """Compute the features of a flat sample in recurrent mode."""
    keys = policy[0].in_keys  # is_init alone must suffice, without trajectory ids
    with set_recurrent_mode(True), torch.no_grad():
        return policy[0](sample.select(*keys))["features"]


def check_features(policy, sample):
    """Check that features recomputed on a sample equal the collected ones, except at padding.

    Cells with matrices norm small sums of large terms, which multiplies rounding.
    """
    mask = sample.get(("collector", "mask"), torch.ones(sample.shape, dtype=torch.bool))
    features = sample["features"][mask]
    size = max(1.0, features.abs().max().item())  # for an LSTM it is below 1
    rounding = 5e-5 if policy[0].net.cell.states_at_ends else 1e-6
    torch.testing.assert_close(recomputed(policy, sample)[mask], features, rtol=0, atol=rounding * size)


def segments(sample):
    """Return the lengths of the segments of a flat sample."""
    starts = sample["is_init"].reshape(-1).nonzero().squeeze(-1)
    return torch.diff(starts, append=torch.tensor([sample.numel()])).tolist()
