import hashlib
from functools import cache

import numpy as np
import pytest

from recurl.core.errors import ArgumentError
from recurl.envs.tasks import BanditVectorEnv


def play(env, choose, seed):
    """Return the mean return over rows of one episode each."""
    env.reset(seed=seed)
    score = np.zeros((env.num_envs, env.single_action_space.n))
    total, truncated = np.zeros(env.num_envs), np.zeros(1, dtype=bool)
    while not truncated.any():
        action = choose(score)
        _, reward, _, truncated, _ = env.step(action)
        score[np.arange(len(action)), action] += 2 * reward - 1
        total += reward
    return total.mean()


BEGAN = {
    "NextStep": "3b7f7d5a224d486eb3c252616f94cebce0aeb08f6decd2fb0ddce24c76b358cb",
    "SameStep": "3eeae0139db1210b8b11e47145c6001a31a2d1000cdea5b8f6bc403543581e86",
    "Disabled": "6730d0d504723a8a333e0e2b0726c1dce3a5f59a92678917f5fd6404908452a7",
}


@pytest.mark.parametrize(("mode", "expected"), BEGAN.items())
def test_a_seed_plays_the_episodes_that_it_always_did(mode, expected):
    env, arms = BanditVectorEnv(5, 7, 33, 0.6, autoreset_mode=mode), np.random.default_rng(3)
    found = hashlib.sha256()

    def note(*values):
        for value in values:
            found.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())

    note(env.reset(seed=11)[0])
    for _ in range(200):
        observation, reward, terminated, truncated, _ = env.step(arms.integers(7, size=5))
        note(observation, reward, terminated, truncated)
        if mode == "Disabled" and truncated.any():
            note(env.reset(options={"reset_mask": truncated})[0])
    note(np.array([rng.random() for rng in env.rngs]))
    assert found.hexdigest() == expected


def test_returns_of_the_best_policies():
    env = BanditVectorEnv(4000)
    assert env.optimal_return() == pytest.approx(play(env, lambda score: score.argmax(1), 0), abs=0.15)
    assert env.memoryless_return() == pytest.approx(play(env, lambda score: np.ones(len(score), int), 1), abs=0.15)


@pytest.mark.parametrize(("arms", "pulls", "probability"), [(2, 6, 0.9), (3, 6, 0.7), (3, 5, 1.0), (2, 1, 0.6)])
def test_no_policy_is_better_than_the_optimal_one(arms, pulls, probability):
    """Compare with dynamic programming over all policies of the counts of rewards and blanks."""

    @cache
    def value(left, counts):
        if left == 0:
            return 0.0
        likelihood = [
            np.prod(
                [
                    (probability if arm == good else 1 - probability) ** won
                    * (1 - (probability if arm == good else 1 - probability)) ** lost
                    for arm, (won, lost) in enumerate(counts)
                ]
            )
            for good in range(arms)
        ]
        posterior = np.array(likelihood) / sum(likelihood)

        def pull(arm):
            chance = posterior[arm] * probability + (1 - posterior[arm]) * (1 - probability)
            won, lost = counts[arm]
            branches = [(chance, 1, (won + 1, lost)), (1 - chance, 0, (won, lost + 1))]
            return sum(
                part * (reward + value(left - 1, (*counts[:arm], count, *counts[arm + 1 :])))
                for part, reward, count in branches
                if part > 0
            )

        return max(pull(arm) for arm in range(arms))

    best = value(pulls, ((0, 0),) * arms)
    assert BanditVectorEnv.optimal_return(arms, pulls, probability) == pytest.approx(best)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_arms": 1}, "num_arms must be an integer of at least 2"),
        ({"pulls": 0}, "pulls must be an integer of at least 1"),
        ({"probability": 0.5}, r"probability must be above 0\.5 and at most 1; got 0\.5"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ArgumentError, match=message):
        BanditVectorEnv(1, **options)
