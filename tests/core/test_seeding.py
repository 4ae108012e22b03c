"""Seeds are derived by one function, and no two generators of a run share a seed."""

import ast
import io
import pickle
import random
from collections import Counter
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from rich.console import Console

import recurl
from recurl.collectors import MultiSyncCollector
from recurl.collectors.actors.group import Recipe
from recurl.core.seeding import derive_seed, env_seed, rng_state, seed_everything, set_rng_state
from recurl.diagnostics.preserve import Snapshot
from recurl.envs import TensorEnv
from recurl.envs.from_function import env_from_function
from recurl.envs.tasks import Bandit
from recurl.envs.tasks.checks import TRIAL_SEED
from recurl.trainers import ALGORITHMS, RunFolder, Trainer, evaluate_run, load, play_run
from recurl.trainers.algorithms import learner as learners
from recurl.trainers.checkpoint import load_checkpoint, save_checkpoint

SEED = 3
CONFORMANCE = Path(recurl.__file__).parent / "conformance"  # seeds other libraries as their users do
SMALL = {"hidden_size": 4, "num_envs": 4, "rollout_steps": 8, "total_steps": 64, "seed": SEED, "cell": "gru"}
FIXED = {TRIAL_SEED, derive_seed(0, "trial of a cell")}  # of checks, which draw the same numbers deliberately
SHARED = {  # deliberately equal on all ranks
    derive_seed(SEED, "minibatches"),
    *(derive_seed(SEED, "networks", name) for name in ("python", "torch")),
    derive_seed(SEED, "networks", "numpy") % 2**32,
}


def draw():
    return random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), *torch.randn(3).tolist()  # noqa: NPY002 - what is tested


def test_same_seed_same_numbers():
    seed_everything(2**40 + 3)
    first = draw()
    seed_everything(2**40 + 3)
    assert draw() == first


def test_state_survives_a_checkpoint(tmp_path):
    seed_everything(1)
    draw()  # leaves a cached normal number in Python's and NumPy's generators
    path = save_checkpoint(tmp_path, 0, {"rng": rng_state()})
    expected = [draw() for _ in range(3)]
    set_rng_state(load_checkpoint(path)["rng"])
    assert [draw() for _ in range(3)] == expected


def test_derived_seeds_are_the_same_everywhere_and_differ_by_every_part():
    assert derive_seed(0, "exploration", 3) == 4178955089143346543
    assert derive_seed(np.int64(2), "a") == derive_seed(2, "a")
    parts = [(), (0,), ("0",), (0, 0), ("a", "b"), ("ab",), ("a,b",), ('a", "b',), (-1,), (2**70,), ("é",)]
    found = {derive_seed(seed, *part) for seed in (0, 1, 2**32, 2**63) for part in parts}
    assert len(found) == 4 * len(parts)
    assert all(0 <= seed < 2**63 for seed in found)
    for wrong in ((0.5,), ("0",), (0, None), (0, 1.0)):
        with pytest.raises(TypeError):
            derive_seed(*wrong)


def test_seeds_of_environments_never_meet():
    purposes = ("training", "restart", "evaluation", "fresh")
    found = [[env_seed(seed, purpose) for seed in range(500)] for purpose in purposes]
    assert all(len(set(seeds)) == 500 for seeds in found)
    for earlier, later in zip(found, [*found[1:], [2**31]], strict=True):
        assert max(earlier) + 2**28 <= min(later)  # room for this many rows
    assert env_seed(0, "restart", 64) != env_seed(0, "restart", 128)


def test_global_generators_have_streams_of_their_own():
    """NumPy's legacy generator and torch's are the same algorithm."""

    def words():
        legacy = np.random.randint(0, 2**32, 4, dtype=np.uint32) % 2**24  # noqa: NPY002 - what is tested
        return legacy.tolist(), (torch.rand(4) * 2**24).long().tolist()

    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    assert len(set(map(tuple, words()))) == 1
    seed_everything(5)
    assert len(set(map(tuple, words()))) == 2


@pytest.mark.parametrize("seed", range(3))
def test_random_actions_know_nothing_of_the_episodes(seed):
    """With equal streams, the drawn arms would always be the good ones."""
    env = TensorEnv(Bandit(num_arms=4), 2000)
    torch.manual_seed(seed)
    env.set_seed(seed)
    root = env.reset()
    reward = env.step(env.rand_action(root))["next", "reward"]
    assert reward.mean() == pytest.approx(0.3, abs=0.05)  # 0.9 from one of four arms, 0.1 from the others


def test_generators_of_an_experiment_have_streams_of_their_own():
    policy = torch.nn.Module()
    own = [torch.Generator(), torch.Generator(), np.random.default_rng(), random.Random(), np.random.RandomState()]
    policy.own = own
    kept = Snapshot(policy)
    kept.seed(0)
    drawn = [torch.rand(4), *(torch.rand(4, generator=each) for each in own[:2])]
    assert len({tuple(values.tolist()) for values in drawn}) == 3
    kept.seed(0)
    assert torch.equal(torch.rand(4), drawn[0])
    kept.restore()


# -- all generators of a run


class Revealing(gym.Env):
    """Environment whose observations reveal the seeds of its own and of the global generators, 16 bits each."""

    observation_space = gym.spaces.Box(-1, 2**16, (8,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        numpy = int(np.random.get_state()[1][0])  # noqa: NPY002 - the seed, as long as nothing is drawn
        numbers = [(self.np_random_seed, 2), (torch.initial_seed(), 4), (numpy, 2)]
        self._seen = [number >> 16 * place & 0xFFFF for number, words in numbers for place in range(words)]
        return np.array(self._seen, np.float32), {}

    def step(self, action):
        self._steps += 1
        return np.array(self._seen, np.float32), float(action), self._steps == 4, False, {}


def joined(words):
    return sum(word << 16 * place for place, word in enumerate(words))


def revealed(batch):
    """Return the seeds in a batch: of the rows, and of the processes' global generators."""
    words = batch["observation"][..., 0, :].reshape(-1, 8).to(torch.int64).tolist()
    join = lambda some: sum(word << 16 * place for place, word in enumerate(some))  # noqa: E731
    rows = [("row", join(row[:2])) for row in words]
    return rows, {
        (name, join(row[part])) for row in words for name, part in (("torch", slice(2, 6)), ("numpy", slice(6, 8)))
    }


@pytest.fixture
def seeds(monkeypatch):
    """Record all seeds passed to generators of this process."""
    found = []

    class Recorded(torch.Generator):
        def manual_seed(self, seed):
            found.append(("generator", seed))
            super().manual_seed(seed)
            return self

    def record(where, name, kind):
        original = getattr(where, name)

        def recording(seed=None, *rest):
            if seed is not None:
                found.append((kind, seed))
            return original(seed, *rest)

        monkeypatch.setattr(where, name, recording)

    monkeypatch.setattr(torch, "Generator", Recorded)
    record(torch, "manual_seed", "torch")
    record(np.random, "seed", "numpy")
    record(np.random, "default_rng", "numpy generator")
    record(random, "seed", "python")
    record(gym.utils.seeding, "np_random", "row")
    return found


def assert_distinct(seeds, also_not=()):
    """Check that seeds differ in the 32 bits used by torch's CPU generator, and that none is the run's."""
    own = [seed for seed in seeds if seed[1] not in FIXED]
    shared = {seed for seed in own if seed[1] in SHARED}
    low = Counter(number % 2**32 for _, number in [*shared, *(seed for seed in own if seed not in shared)])
    assert [number for number, count in low.items() if count > 1] == []
    assert not set(low) & {SEED, *range(50), *also_not}


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "distill"])  # needs a teacher
@pytest.mark.parametrize("vectorization", ["native", "device"])
def test_no_two_generators_of_a_run_over_ranks_have_the_same_seed(algorithm, vectorization, seeds, monkeypatch):
    config, kind = ALGORITHMS[algorithm]
    task = {"env": "recurl/MaskedPendulum-v1" if algorithm == "td3" else "recurl/RepeatPrevious-v0"}
    for rank in range(4):
        monkeypatch.setattr(learners, "rank", lambda rank=rank: rank)
        made = kind(config(**SMALL, **task, vectorization=vectorization))
        made.collect()
        made.close()
    assert_distinct(seeds)
    of_rows = [seed for name, seed in seeds if name == ("row" if vectorization == "native" else "generator")]
    assert len(set(of_rows) - FIXED - SHARED) == (16 if vectorization == "native" else 4)


PROCESSES = {
    "sync": {"vectorization": "sync"},
    "async": {"vectorization": "async", "num_envs": 2},
    "workers": {"env_workers": 2},
    "groups": {"env_workers": 2, "env_groups": 2},
    "overlap": {"overlap": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", PROCESSES)
@pytest.mark.usefixtures("shared_interpreter", "forked_environments")
def test_no_two_processes_of_a_run_have_the_same_seed(how, seeds, monkeypatch):
    config, kind = ALGORITHMS["ppo"]
    found = []
    for rank in range(2):
        monkeypatch.setattr(learners, "rank", lambda rank=rank: rank)
        options = config(**{**SMALL, **PROCESSES[how]}, env=Revealing, sequence_length=4)
        made = kind(options)
        rows, processes = revealed(made.collect())
        made.close()
        found += [
            *rows,
            *(processes if how not in ("sync", "async") else ()),
        ]  # these processes are this one, or Gymnasium's
    assert len(found) == {"sync": 8, "async": 4, "workers": 16, "groups": 16, "overlap": 12}[how]
    assert_distinct([*found, *(seed for seed in seeds if seed[0] != "row")])


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_no_two_workers_of_a_collector_have_the_same_seed(seeds):
    create = partial(env_from_function, Revealing, 2)
    seed_everything(SEED)
    found = []
    shape = {"frames_per_batch": 24, "cat_results": 0, "reset_at_each_iter": True}
    with MultiSyncCollector([create] * 3, **shape) as collector:
        for seed in (1000, 2000):
            collector.set_seed(seed)
            rows, processes = revealed(collector.collect())
            assert sorted(row for _, row in rows) == list(range(seed, seed + 6))
            found += [*rows, *processes]
    assert len(found) == 2 * (6 + 6)
    assert_distinct([*found, *seeds])


def test_no_two_actors_have_the_same_seed():
    found = []
    for rank in range(2):
        recipe = Recipe([Revealing] * 3, None)
        recipe.rows = 2
        seed = 1000 + rank * 6
        found.append([(seed + actor * 2, recipe.own_seed(seed, actor)) for actor in range(3)])
        recipe.replaced = 4  # before the program was resumed
        later = ((recipe.env_seed(actor, time), recipe(actor, time)) for time in (1, 2) for actor in range(3))
        found.append([(first, pickle.loads(own).seed) for first, own in later])
    rows = [first + row for some in found for first, _ in some for row in range(2)]
    assert_distinct([("row", row) for row in rows] + [("torch", own) for some in found for _, own in some])


@pytest.mark.parametrize("vectorization", ["native", "device"])
def test_evaluations_have_seeds_of_their_own(vectorization, seeds, tmp_path):
    config, _ = ALGORITHMS["ppo"]
    options = config(
        **SMALL,
        env="recurl/RepeatPrevious-v0",
        vectorization=vectorization,
        eval_every=64,
        eval_episodes=3,
        logger="none",
    )
    folder = RunFolder(tmp_path, lambda text: None)
    folder.create(options)
    trainer = Trainer(options, folder, console=Console(file=io.StringIO()))
    trainer.run()
    trainer.close()
    trained = list(seeds)
    evaluate_run(folder, episodes=3, deterministic=False)
    assert_distinct(seeds)
    played = seeds[len(trained) :]
    del seeds[len(trained) :]
    play_run(folder, deterministic=False)
    assert_distinct(seeds)
    load(folder.path).set_seed(SEED)
    assert_distinct([*seeds, *(seed for seed in played if seed not in seeds)])


def test_a_run_resumed_on_other_ranks_has_other_seeds(seeds, monkeypatch):
    config, kind = ALGORITHMS["ppo"]
    made = kind(config(**SMALL, env="recurl/RepeatPrevious-v0"))
    made.collect()
    state = made.state_dict()
    for rank in range(3):
        monkeypatch.setattr(learners, "rank", lambda rank=rank: rank)
        made.load_state_dict(state, begin_anew=True)
        made.collector.reset_rows(torch.ones(4, dtype=torch.bool))
        made.collect()
    made.close()
    assert_distinct(seeds)


def test_sweeps_have_no_environments_in_common(seeds):
    config, kind = ALGORITHMS["a2c"]
    for seed in range(3):
        made = kind(config(**{**SMALL, "seed": 100 + seed}, env="recurl/RepeatPrevious-v0"))
        made.collect()
        made.close()
    assert len([seed for name, seed in seeds if name == "row"]) == 12
    assert_distinct(seeds, also_not=range(100, 103))


# -- all seeds in the source


SEEDING = {"manual_seed", "default_rng", "seed", "Random", "RandomState", "PCG64", "MT19937", "Philox", "SeedSequence"}


def test_every_generator_is_seeded_by_the_function_that_derives_seeds():
    """Arguments of ``manual_seed(...)`` and the like are calls of derive_seed, or names of its results."""
    found = 0
    for path in Path(recurl.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if path.is_relative_to(CONFORMANCE) or not any(f".{name}(" in text for name in SEEDING):
            continue
        tree = ast.parse(text)
        derived = {
            name.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and "derive_seed(" in ast.unparse(node.value)
            for name in node.targets
            if isinstance(name, ast.Name)
        } | {"TRIAL_SEED"}
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SEEDING
            if called and node.args and "kept" not in ast.unparse(node.func):
                found += 1
                argument = ast.unparse(node.args[0])
                names = {name.id for name in ast.walk(node.args[0]) if isinstance(name, ast.Name)}
                assert "derive_seed(" in argument or names & derived, f"{path}:{node.lineno}: {ast.unparse(node)}"
    assert found > 15
