"""Functions run by the ranks of the tests."""

from __future__ import annotations

import contextlib
import io
import itertools
import runpy
import sys
from unittest import mock

import torch
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

from recurl.collectors import Collector
from recurl.core.errors import RecurlError
from recurl.core.seeding import env_seed, seed_everything
from recurl.distributed import global_statistics, rank, world_size
from recurl.objectives import ClipPPOLoss, sequences
from recurl.objectives.value import GAE
from recurl.trainers import PPOConfig, R2D2Config, RunFolder, Trainer
from recurl.trainers.algorithms.a2c import A2C
from recurl.trainers.algorithms.configs import A2CConfig, ImpalaConfig
from recurl.trainers.algorithms.environment import training_env
from recurl.trainers.algorithms.impala import Impala
from recurl.trainers.algorithms.ppo import PPO
from recurl.trainers.algorithms.table import make_algorithm
from recurl.trainers.networks.agent import collecting
from recurl.trainers.run.episodes import EpisodeStats
from tests.trainers import faulty as faulty

KINDS = {"ppo": (PPO, PPOConfig), "a2c": (A2C, A2CConfig), "impala": (Impala, ImpalaConfig)}
UPDATES = 5


class Joined:
    """Collects the batches of all ranks of a run, one after another, in one process."""

    def __init__(self, config, policy, ranks):
        self._collectors, self._states = [], []
        first = torch.get_rng_state()
        for number in range(ranks):
            env = training_env(config)
            env.set_seed(env_seed(config.seed, "training") + number * config.num_envs)
            self._collectors.append(Collector(env, collecting(policy), frames_per_batch=config.frames_per_batch))
            if number:
                seed_everything(config.seed, "training", number)
            self._states.append(torch.get_rng_state() if number else first)

    def collect(self):
        batches = []
        for number, collector in enumerate(self._collectors):
            torch.set_rng_state(self._states[number])
            batches.append(collector.collect())
            self._states[number] = torch.get_rng_state()
        return torch.cat(batches)

    def update_policy_weights_(self):
        """Do nothing: the collectors have the policy itself."""

    def shutdown(self):
        for collector in self._collectors:
            collector.shutdown()


def double(kind):
    class Double(kind):
        @classmethod
        def make_agent(cls, config, observation_spec, action_spec):
            return super().make_agent(config, observation_spec, action_spec).double()

    return Double


def learn(algorithm, options, ranks=1, in_float64=False):
    """Run five updates; with ``ranks``, in one process that has the environments of that many ranks."""
    kind, config = KINDS[algorithm]
    kind = double(kind) if in_float64 else kind
    options = {"env": "recurl/MaskedCartPole-v1", "hidden_size": 8, "num_envs": 2, "rollout_steps": 16, **options}
    steps = options["num_envs"] * options["rollout_steps"] * ranks * world_size()
    config_of_all = config(**{**options, "num_envs": options["num_envs"] * ranks}, total_steps=UPDATES * steps)
    learner = kind(config_of_all)
    if in_float64 and learner.scaler is not None:
        learner.scaler.double()
    if ranks > 1:
        learner.collector.shutdown()
        learner.collector = Joined(config(**options, total_steps=UPDATES * steps), learner.agent.policy, ranks)
    stats, rows = EpisodeStats(config_of_all.num_envs), []
    for _ in range(UPDATES):
        batch = learner.collect()
        stats.update(batch["next", "reward"][..., 0].float(), batch["next", "done"][..., 0])
        rows.append(
            {**learner.learn(batch), **learner.scheduled, "steps": learner.env_steps, "mean": stats.mean_return}
        )
    rows.append({"episodes": stats.episodes, "length": stats.mean_length})
    learner.close()
    scaler = {} if learner.scaler is None else learner.scaler.moments.state_dict()
    state = {**learner.agent.state_dict(), **{f"scaler.{name}": value for name, value in scaler.items()}}
    return {"rank": rank(), "state": {name: value.clone() for name, value in state.items()}, "rows": rows}


def learn_as_graphs(algorithm, options):
    """Run five updates whose compiled functions are graphs that aren't compiled further."""
    with graphs_only():
        return learn(algorithm, options)


class Harder:
    """Raises the randomization with every update."""

    def on_start(self, trainer):
        self.trainer = trainer

    def on_update(self, row):
        self.trainer.set_parameters(randomization=row["update"] / 100)


def train(path, stop_after=None, resume=False, kind=PPOConfig, curriculum=False, **options):
    """Run in a folder shared by the ranks; with ``stop_after``, only the last rank stops after that many updates."""
    folder = RunFolder(path, print, trust=True)  # its Ray cluster belongs to the tests
    values = {
        "env": "recurl/RepeatPrevious-v0",
        "env_kwargs": ("k=1", "episode_length=8"),
        "hidden_size": 8,
        "num_envs": 2,
        "rollout_steps": 8,
        "minibatches": 2,
        "sequence_length": 4,
        "total_steps": 192 * world_size(),
        "checkpoint_every": 4,
        "logger": "none",
        **options,
    }
    values = {name: value for name, value in values.items() if value is not None}
    config = folder.read_config() if resume else kind(**values)
    out, updates = io.StringIO(), itertools.count(1)
    callbacks = [Harder()] if curriculum else []
    trainer = Trainer(config, folder, console=Console(file=out, quiet=rank() > 0), callbacks=callbacks)
    try:
        if resume:
            trainer.resume()
        elif rank() == 0:
            folder.create(config)
        asked = rank() == world_size() - 1 and stop_after is not None
        outcome = trainer.run(lambda: asked and next(updates) == stop_after)
    except RecurlError as error:
        return str(error)
    finally:
        trainer.close()
    state = {name: value.clone() for name, value in trainer.algorithm.agent.state_dict().items()}
    found = trainer.parameters if curriculum else out.getvalue()
    return outcome.status, outcome.env_steps, outcome.return_mean, state, found


def refusal(kind, **options):
    """Return the error message for a learner with these options."""
    small = {"env": "recurl/TMaze-v0", "num_envs": 2, "rollout_steps": 8, "total_steps": 64, "hidden_size": 4}
    own = {"sequence_length": 4, "minibatches": 2} if kind is PPOConfig else {}
    try:
        make_algorithm(kind(**{**small, **own, **options})).close()
    except RecurlError as error:
        return str(error)
    return ""


def improve(kind, env, rows):
    """Return gradients of one step on a batch of eight rows, divided among the ranks."""
    small = {"rollout_steps": 12, "total_steps": 96 * world_size(), "hidden_size": 4, "seed": 3}
    replay = {"slices": 2, "slice_length": 12, "learning_starts": 1}
    learner = make_algorithm(kind(env=env, num_envs=rows, **small, **replay))
    torch.manual_seed(0)
    whole = training_env(kind(env=env, num_envs=8, **small, **replay))
    whole.set_seed(0)
    collector = Collector(whole, collecting(learner.agent.policy), frames_per_batch=96)
    own = collector.collect()[rank() * rows : (rank() + 1) * rows].reshape(-1)
    trained = own.select(*learner.loss.in_keys, strict=False)
    learner.sample = lambda: (trained, trained)
    learner.prioritize = lambda *_: None  # the steps aren't from the buffer
    numbers = learner.update(learner.count())
    norms = {name: value.item() for name, value in numbers.items() if name.startswith("grad_norm")}
    gradients = {name: value.grad for name, value in learner.agent.named_parameters() if value.grad is not None}
    collector.shutdown()
    learner.close()
    return norms, gradients


def estimate_as_on_a_gpu(algorithm, options):
    """Return whether advantages are compiled if ends aren't gathered, and the results of learning with them."""
    gathered, sequences._GATHERED_ON = sequences._GATHERED_ON, ()
    try:
        kind, config = KINDS[algorithm]
        small = {"env": "recurl/MaskedCartPole-v1", "num_envs": 2, "rollout_steps": 16, "hidden_size": 8}
        with graphs_only():
            learner = kind(config(**small, **options, total_steps=4096))
            is_program = learner._results.explain().form == "inductor"
            learner.close()
            return is_program, learn(algorithm, options)
    finally:
        sequences._GATHERED_ON = gathered


def replay_weights(compiled):
    """Return the weights after some updates from slices drawn on the device."""
    sizes = {
        "num_envs": 2,
        "rollout_steps": 16,
        "hidden_size": 4,
        "slices": 4,
        "slice_length": 8,
        "learning_starts": 16,
    }
    options = {"gradient_steps": 2, "total_steps": 4096, "drawn_on": "device", "compile": compiled}
    learner = make_algorithm(R2D2Config(env="recurl/MaskedCartPole-v1", **sizes, **options))
    with graphs_only():
        for _ in range(4):
            learner.learn(learner.collect())
    weights = {name: value.detach().clone() for name, value in learner.agent.named_parameters()}
    learner.close()
    return weights


def replayed(path, kind, stop_after=None, resume=False):
    """Run an algorithm that learns from replay."""
    sizes = {"slices": 4, "slice_length": 6, "burn_in": 2, "gradient_steps": 2}
    sizes |= {"learning_starts": 32, "buffer_size": 64}
    return train(path, stop_after, resume, kind=kind, minibatches=None, sequence_length=None, **sizes)


def wrapped():
    """Run the example with torch's DistributedDataParallel; return the output of rank 0."""
    with mock_arguments("examples/ddp.py", "1024"), contextlib.redirect_stdout(io.StringIO()) as said:
        names = runpy.run_path("examples/ddp.py")
    return said.getvalue(), {name: value.detach().clone() for name, value in names["loss"].named_parameters()}


@contextlib.contextmanager
def mock_arguments(*arguments):
    before, sys.argv = sys.argv, list(arguments)
    yield
    sys.argv = before


def ddp_gradients(in_ddp):
    """Return gradients of a loss inside DistributedDataParallel, on a rank's half of a batch or all of it."""
    torch.manual_seed(0)
    small = {"env": "recurl/TMaze-v0", "num_envs": 4, "rollout_steps": 8, "total_steps": 64, "hidden_size": 4}
    config = PPOConfig(**small, sequence_length=8)
    env = training_env(config)
    env.set_seed(0)
    agent = PPO.make_agent(config, env.observation_spec, env.action_spec_unbatched)
    batch = Collector(env, collecting(agent.policy), frames_per_batch=32).collect()
    GAE(0.99, 0.95, agent.critic)(batch)
    loss = ClipPPOLoss(agent.actor, agent.critic, normalize_advantage=True)
    own = batch.split(4 // world_size())[rank()]
    module = DistributedDataParallel(loss) if in_ddp else loss
    with global_statistics():
        losses = module(own)
    sum(losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy")).backward()
    return {name: value.grad for name, value in loss.named_parameters()}


@contextlib.contextmanager
def graphs_only():
    """Run graphs without compiling them with Inductor, which takes each rank many seconds."""
    with mock.patch(
        "recurl.execution.traced.inductor_program", lambda graph, kept, *_: lambda *tensors: graph(*tensors, *kept)
    ):
        yield
