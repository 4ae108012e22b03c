"""The symmetry loss in runs."""

import pytest
import torch

from recurl.core.errors import ArgumentError
from recurl.core.symmetry import SignedPermutation, Symmetry
from recurl.trainers import PPO, A2CConfig, ImpalaConfig, PPOConfig
from recurl.trainers.algorithms.table import make_algorithm
from tests.trainers.resumes import assert_resumes_bit_for_bit, small

pytestmark = pytest.mark.usefixtures("no_curves")

ARM, CARTPOLE = (("recurl/MaskedArm-v0", "ARM_MIRROR"), ("recurl/MaskedCartPole-v1", "CARTPOLE_MIRROR"))
NOT_ONE, WRONG = ["mirror"], Symmetry({"speed": torch.neg})
TWO = [Symmetry({"observation": SignedPermutation([-1, -1])}), Symmetry({"observation": torch.neg}, action=torch.neg)]


def options(task, **more):
    env, mirror = task
    return {"env": env, "symmetry": (f"recurl.envs.tasks:{mirror}",), **more}


def learned(kind, updates=3, **more):
    given = {"hidden_size": 8, "num_envs": 4, "rollout_steps": 16, "total_steps": 64 * updates, "seed": 1, **more}
    given |= {"minibatches": 2, "sequence_length": 8} if kind is PPOConfig and "minibatches" not in more else {}
    learner = make_algorithm(kind(**given))
    rows = [learner.learn(learner.collect()) for _ in range(updates)]
    learner.close()
    return learner, rows


@pytest.mark.parametrize("kind", [PPOConfig, A2CConfig, ImpalaConfig])
@pytest.mark.parametrize("task", [ARM, CARTPOLE], ids=["arm", "cartpole"])
def test_every_on_policy_algorithm_has_the_loss(kind, task):
    learner, rows = learned(kind, **options(task))
    assert list(rows[0]) == list(learner.reported)
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in rows)
    assert all(abs(row["asymmetry"]) > 1e-9 for row in rows[1:])  # divergences this small may round below zero
    _, without = learned(kind, **options(task, symmetry=()))
    assert "asymmetry" not in without[0]
    assert without[-1]["loss_critic"] != rows[-1]["loss_critic"]


@pytest.mark.parametrize(
    "more",
    [
        {"cell": "none"},
        {"cell": "gru", "num_layers": 2, "store_states": "starts"},
        {"cell": "mingru", "backend": "loop"},
        {"cell": "lstm", "backend": "pad", "shared_trunk": False},
        {"previous_action": True, "previous_reward": True},
        {"sequence_length": 6, "minibatches": 3},
        {"critic_observations": ("privileged",)},
        {"drop_observations": ("privileged",), "normalize_observations": False},
    ],
    ids=str,
)
def test_the_loss_goes_with_other_options(more):
    _, rows = learned(PPOConfig, **options(ARM, **more))
    assert all(torch.tensor(list(row.values())).isfinite().all() and row["asymmetry"] > 0 for row in rows)


def test_the_loss_drives_the_asymmetry_down():
    more = {"num_envs": 16, "rollout_steps": 32, "learning_rate": 3e-3, "drop_observations": ("privileged",)}
    last = {
        coeff: learned(PPOConfig, 12, total_steps=10_000, symmetry_coeff=coeff, **options(ARM, **more))[1][-1][
            "asymmetry"
        ]
        for coeff in (0.0, 1.0)
    }
    assert last[1.0] < 0.2 * last[0.0]


def test_statistics_of_observations_are_symmetric():
    learner, _ = learned(PPOConfig, **options(ARM, drop_observations=("privileged",)))
    moments = learner.agent.norm.moments
    flipped = torch.tensor([-1, 1, 1, -1, -1, 1]) < 0
    assert moments.mean[flipped].abs().max() < 1e-6
    assert moments.mean[~flipped].abs().min() > 1e-6
    assert moments.count == 2 * 3 * 64


def test_several_symmetries_are_averaged():
    learner, rows = learned(PPOConfig, env="recurl/MaskedPendulum-v1", symmetry=(f"{__name__}:TWO",))
    assert len(learner.symmetry.symmetries) == 2
    assert rows[-1]["asymmetry"] > 0


def test_minibatches_of_rows_have_the_loss_of_flat_ones():
    """Captured updates take rows."""

    def update(rows):
        ppo = PPO(
            PPOConfig(hidden_size=8, num_envs=4, rollout_steps=16, total_steps=640, sequence_length=8, **options(ARM))
        )
        batch = ppo.collect()
        orders = ppo._orders(batch) if rows else None
        found = ppo.update(batch, orders)
        ppo.close()
        return found, torch.nn.utils.parameters_to_vector(ppo.agent.parameters()).detach()

    for one, other in zip(update(True), update(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", [ARM, CARTPOLE], ids=["arm", "cartpole"])
def test_runs_resume_bit_for_bit(task, tmp_path):
    assert_resumes_bit_for_bit(small(**options(task)), tmp_path)


@pytest.mark.slow
def test_compiled_losses_are_those_of_torch():
    plain, compiled = (learned(PPOConfig, 2, **options(ARM, compile=flag))[1] for flag in (False, True))
    assert compiled[-1]["asymmetry"] == pytest.approx(plain[-1]["asymmetry"], rel=1e-3)


def test_what_is_not_possible_is_refused():
    with pytest.raises(ArgumentError, match="in this process: leave out --overlap"):
        PPOConfig(overlap=True, **options(ARM))
    with pytest.raises(ArgumentError, match="in this process: leave out --collectors"):
        A2CConfig(collectors="ray:2", **options(ARM))
    with pytest.raises(ArgumentError, match="--symmetry-coeff must not be negative"):
        PPOConfig(symmetry_coeff=-1.0, **options(ARM))
    for name, message in (
        ("NOT_ONE", "must be a Symmetry or a list of them"),
        ("WRONG", "transforms 'speed', but the observations are"),
        ("NONE", "has no 'NONE'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make_algorithm(PPOConfig(env="recurl/MaskedArm-v0", symmetry=(f"{__name__}:{name}",)))
