"""Recurrent PPO of recurl and of rsl_rl with the same networks on the same simulator: learning phase and iterations.

The simulator is recurl's two-link arm with rsl_rl's VecEnv protocol; an episode ends at a random step up to the 200th
(``--longest``), as robots fall, so that some 12 % of the first rows of 24 steps contain an end. Critics also see the
privileged observations, both networks normalize what they see, and the learning rate follows the KL divergence; else,
the defaults of rsl_rl (4,096 environments, 24 steps, 5 epochs of 4 minibatches, memory of 256 units, MLPs of 3 x 256
with ELU). recurl's networks are converted from rsl_rl's (``from_rsl_rl``).

First it is checked, in float32, that both compute the same: log-probabilities and values of a rollout with resets,
returns, and the losses of whole updates with the same minibatches, before and after other minibatches were learned.
Then, in turn, medians of the learning phase (advantages and all gradient steps, from the same rollout) and of whole
iterations with the same simulator. recurl's are compiled and captured on a GPU. rsl_rl's are the body of
``OnPolicyRunner.learn`` without its logger, and the fastest of the given ``torch_compile_modes`` counts: by default
only ``none``, as it is in rsl_rl, since the compiled models are compiled again for every number of episodes. Appends to
results/rsl_rl.csv. Usage::

    pip install --no-deps rsl-rl-lib tensorboard
    python benchmarks/bench_rsl_rl.py
    python benchmarks/bench_rsl_rl.py --device cpu --envs 64 --hidden 32 --repeats 3
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rsl_rl.algorithms import PPO as TheirPPO
from rsl_rl.models import RNNModel
from rsl_rl.storage import RolloutStorage
from rsl_rl.utils import check_nan
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from recurl import __version__
from recurl.core.devices import cpu_name
from recurl.envs import TensorEnv, VecTensorEnv
from recurl.envs.tasks import MaskedArm
from recurl.modules.rsl_rl import from_rsl_rl
from recurl.trainers import PPO, OwnActorCritic, PPOConfig
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "rsl_rl.csv"
GROUPS = {"actor": ["policy"], "critic": ["policy", "privileged"]}
ENTROPY = 0.01  # coefficient
COMMON = {"gamma": 0.99, "learning_rate": 1e-3}
WARM_UP = 4  # updates after which nothing more is compiled or captured


class FallingArm(MaskedArm):
    """Arm whose episodes end at a random step."""

    def begin(self, xp: Any, draw: Any) -> dict[str, Any]:
        """Draw the last step of each row, too."""
        return {**super().begin(xp, draw), "last": xp.floor(draw.uniform(1.0, self.step_limit, (1,))[0])}

    def advance(self, xp: Any, state: dict[str, Any], steps: Any, actions: Any) -> tuple[dict[str, Any], Any, Any]:
        """End the rows that are at their last step."""
        state, reward, _ = super().advance(xp, state, steps, actions)
        return state, reward, steps + 1 >= state["last"]


class Simulator:
    """The arm with rsl_rl's VecEnv protocol."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.num_envs, self.num_actions, self.device = options.envs, 2, options.device
        self.env = TensorEnv(FallingArm(max_episode_steps=options.longest), options.envs, device=options.device)
        self.env.set_seed(0)
        self.reset()

    def reset(self) -> None:
        """Reset all rows."""
        self.root = self.env.reset()

    def seed(self, seed: int) -> None:
        """Seed the next reset."""
        self.env.set_seed(seed)

    def get_observations(self) -> TensorDict:
        """Return what the actor sees, and what only the critic does."""
        names = {"policy": "observation", "privileged": "privileged"}
        return TensorDict({group: self.root[name] for group, name in names.items()}, [self.num_envs], self.device)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Step all rows, and reset those that are done."""
        done, self.root = self.env.step_and_maybe_reset(self.root.set("action", actions))
        after = done["next"]
        return self.get_observations(), after["reward"][:, 0], after["done"][:, 0], {}


def ours(options: argparse.Namespace, checkpoint: dict[str, Any], cell: str, **changes: Any) -> PPO:
    """Return recurl's PPO with the weights of a checkpoint."""

    class Learner(PPO):
        @classmethod
        def make_agent(cls, config: PPOConfig, observation_spec: Any, action_spec: Any) -> OwnActorCritic:
            keys = {"observations": GROUPS["actor"], "critic_observations": GROUPS["critic"]}
            networks = from_rsl_rl(checkpoint, **keys, recurrent_backend=config.backend)
            return OwnActorCritic(config, observation_spec, *networks)

    config = {
        "env": VecTensorEnv(Simulator(options)),
        "critic_observations": ("privileged",),
        "device": options.device,
        "cell": cell,
        "hidden_size": options.hidden,
        "num_envs": options.envs,
        "rollout_steps": options.steps,
        "sequence_length": options.steps,
        "epochs": options.epochs,
        "minibatches": options.minibatches,
        "total_steps": 10**12,
        "cuda_graph": options.device != "cpu",
        "compile": options.compile,
        "normalize_observations": False,  # the networks do it
        "scale_rewards": False,
        "gae_lambda": 0.95,
        "clip_epsilon": 0.2,
        "clip_value": 0.2,
        "critic_coeff": 1.0,
        "entropy_coeff": ENTROPY,
        "entropy_coeff_schedule": "constant",
        "learning_rate_schedule": "adaptive",
        "target_kl": 0.01,
        "max_grad_norm": 1.0,
        "adam_eps": 1e-8,
        **COMMON,
        **changes,
    }
    return Learner(PPOConfig(**config))


class Theirs:
    """rsl_rl's PPO and the body of its runner."""

    def __init__(self, options: argparse.Namespace, cell: str, **changes: Any) -> None:
        self.env = Simulator(options)
        self.observations, self.steps = self.env.get_observations(), options.steps
        sizes = {"hidden_dims": [options.hidden] * 3, "rnn_type": cell, "rnn_hidden_dim": options.hidden}
        shared = {**sizes, "obs_normalization": True}
        gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
        torch.manual_seed(0)
        actor = RNNModel(self.observations, GROUPS, "actor", 2, distribution_cfg=gaussian, **shared)
        critic = RNNModel(self.observations, GROUPS, "critic", 1, **shared)
        storage = RolloutStorage("rl", options.envs, options.steps, self.observations, [2], options.device)
        self.ppo = TheirPPO(
            actor,
            critic,
            storage,
            num_learning_epochs=options.epochs,
            num_mini_batches=options.minibatches,
            entropy_coef=ENTROPY,
            normalize_advantage_per_mini_batch=True,
            device=options.device,
            **{**COMMON, **changes},
        )
        for model in (actor, critic):  # statistics as after some updates
            model.update_normalization(self.observations)

    def checkpoint(self) -> dict[str, Any]:
        """Return what the runner saves."""
        return {**self.ppo.save(), "iter": 0, "infos": None}

    def collect(self) -> None:
        """Fill the storage."""
        with torch.inference_mode():
            for _ in range(self.steps):
                actions = self.ppo.act(self.observations)
                self.observations, rewards, dones, extras = self.env.step(actions)
                check_nan(self.observations, rewards, dones)
                self.ppo.process_env_step(self.observations, rewards, dones, extras)

    def replay(self, batch: TensorDictBase) -> list[Tensor]:
        """Fill the storage with a batch of recurl, ``[B, T]``, and return its log-probabilities and values."""
        self.ppo.storage.clear()
        names = ["policy", "privileged"]
        with torch.inference_mode():
            for t in range(self.steps):
                now = batch[:, t]
                self.ppo.act(now.select(*names).to_tensordict())
                self.ppo.transition.actions = now["action"]
                self.ppo.transition.actions_log_prob = self.ppo.actor.get_output_log_prob(now["action"])
                done = now["next", "done"][:, 0]
                self.ppo.process_env_step(self.observations, now["next", "reward"][:, 0], done, {})
            self.observations = batch[:, -1]["next"].select(*names).to_tensordict()
        storage = self.ppo.storage
        return [storage.actions_log_prob.squeeze(-1).mT, storage.values.squeeze(-1).mT]

    def learn(self) -> dict[str, float]:
        """Learn from the storage."""
        with torch.inference_mode():
            self.ppo.compute_returns(self.observations)
        return self.ppo.update()


def check(options: argparse.Namespace, cell: str) -> None:
    """Compare rollouts, returns and losses of both, in float32 and by turns with learning.

    What differs is left out: the order of minibatches, the norm that gradients are clipped to (rsl_rl's is of actor and
    critic apart), and the divisor of the advantages' variance. Adam's epsilon is large, as otherwise gradients that are
    zero but for rounding move weights by a whole learning rate.
    """
    options = argparse.Namespace(**{**vars(options), "envs": 64})
    unclipped = float("inf")
    theirs = Theirs(options, cell, max_grad_norm=unclipped, schedule="fixed")
    changes = {"learning_rate_schedule": "constant", "max_grad_norm": unclipped, "cuda_graph": False, "adam_eps": 1e-3}
    mine = ours(options, theirs.checkpoint(), cell, **changes)
    theirs.ppo.optimizer.param_groups[0]["eps"] = changes["adam_eps"]
    mine.loss.normalize_advantage = False
    worst: dict[str, float] = {}

    def compare(what: str, found: Any, wanted: Any, tolerance: float) -> None:
        found, wanted = (torch.as_tensor(value).double().cpu() for value in (found, wanted))
        error = ((found - wanted).abs() / (1 + wanted.abs())).max().item()
        worst[what] = max(error, worst.get(what, 0.0))
        if not error <= tolerance:
            sys.exit(f"{cell}: {what} differ by {error:.1e}, more than {tolerance:.0e}; so far: {worst}")

    for _ in range(3):
        batch = mine.collect()
        if not batch["next", "done"].any():
            sys.exit("The rollout has no episode ends.")
        log_probs, values = theirs.replay(batch)
        compare("log-probabilities", batch["action_log_prob"], log_probs, 1e-5)
        orders = torch.arange(options.envs, device=options.device).expand(options.epochs, -1)
        metrics = dict(zip(mine.reported, mine.update(batch, orders).tolist(), strict=True))
        compare("values", batch["state_value"][..., 0], values, 1e-5)
        with torch.inference_mode():
            theirs.ppo.compute_returns(theirs.observations)
        storage = theirs.ppo.storage
        compare("returns", batch["value_target"][..., 0], storage.returns.squeeze(-1).mT, 1e-4)
        theirs.ppo.normalize_advantage_per_mini_batch = False  # the update then leaves them as they are
        losses = theirs.ppo.update()
        theirs.ppo.normalize_advantage_per_mini_batch = True  # and so do the returns
        compare("surrogate losses", metrics["loss_objective"], losses["surrogate"], 1e-4)
        compare("value losses", metrics["loss_critic"], losses["value"], 1e-4)
        compare("entropies", -metrics["loss_entropy"] / ENTROPY, losses["entropy"], 1e-4)
        mine.agent.observe(batch)
    print(f"{cell}: both compute the same, up to", ", ".join(f"{k} {v:.0e}" for k, v in worst.items()), flush=True)
    mine.close()


def measure(options: argparse.Namespace, cell: str) -> None:
    """Time both, in turn."""
    peers = {mode: Theirs(options, cell) for mode in options.torch_compile_modes}
    began = time.perf_counter()
    mine = ours(options, next(iter(peers.values())).checkpoint(), cell)
    first = mine.collect()
    shared = first.clone()
    mine.learn(first)
    for _ in range(WARM_UP):
        mine.learn(mine.collect())
    setup = time.perf_counter() - began
    ways: dict[str, Callable[[], Any]] = {
        "recurl_learn": lambda: mine.learn(shared.clone(recurse=False)),
        "recurl_collect": mine.collect,
        "recurl": lambda: mine.learn(mine.collect()),
    }
    for mode, peer in peers.items():
        if mode != "none":
            peer.ppo.compile(mode)
        for _ in range(WARM_UP):
            peer.collect()
            peer.learn()
        ways |= {
            f"{mode}_collect": peer.collect,
            f"{mode}_learn": peer.learn,
            f"{mode}": lambda peer=peer: (peer.collect(), peer.learn()),
        }
    simulator, actions = Simulator(options), torch.zeros(options.envs, 2, device=options.device)
    ways["simulator"] = lambda: [simulator.step(actions) for _ in range(options.steps)]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for mode, peer in peers.items():
            peer.ppo.storage.clear()
            peer.replay(shared)  # the learning phase sees the rollout of recurl's
            times[f"{mode}_learn"].append(wall(ways[f"{mode}_learn"]))
            times[f"{mode}_collect"].append(wall(ways[f"{mode}_collect"]))
            peer.ppo.storage.clear()
            times[mode].append(wall(ways[mode]))
        for name in ("recurl_learn", "recurl_collect", "recurl", "simulator"):
            times[name].append(wall(ways[name]))
    median = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    learns = min(peers, key=lambda mode: median[f"{mode}_learn"])
    whole = min(peers, key=lambda mode: median[mode])
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": options.commit,
        "recurl": __version__,
        "rsl_rl": version("rsl-rl-lib"),
        "torch": torch.__version__,
        "device": cpu_name() if options.device == "cpu" else torch.cuda.get_device_name(),
        "precision": torch.get_float32_matmul_precision(),
        "cell": cell,
        **{name: getattr(options, name) for name in ("envs", "steps", "longest", "hidden", "epochs", "minibatches")},
        "learn_ms": round(median["recurl_learn"], 2),
        "rsl_rl_learn_ms": round(median[f"{learns}_learn"], 2),
        "learn_ratio": round(median[f"{learns}_learn"] / median["recurl_learn"], 2),
        "iteration_ms": round(median["recurl"], 2),
        "rsl_rl_iteration_ms": round(median[whole], 2),
        "iteration_ratio": round(median[whole] / median["recurl"], 2),
        "collect_ms": round(median["recurl_collect"], 2),
        "rsl_rl_collect_ms": round(min(median[f"{mode}_collect"] for mode in peers), 2),
        "simulator_ms": round(median["simulator"], 2),
        "torch_compile_mode": learns,
        "setup_s": round(setup, 1),
    }
    append(options.csv, row)
    print(row, flush=True)
    mine.close()


def wall(run: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Check, then measure every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cells", nargs="+", default=["lstm", "gru"])
    parser.add_argument("--envs", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--longest", type=int, default=200, help="steps of the longest episodes")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="recurl's updates; on a GPU by default"
    )
    parser.add_argument("--torch-compile-modes", nargs="+", default=["none"], help="of rsl_rl")
    parser.add_argument("--precision", default="high", help="of float32 products, of both")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=commit(), help="what to write into the column 'commit'")
    options = parser.parse_args()
    options.compile = options.device != "cpu" if options.compile is None else options.compile
    for step, cell in itertools.product((check, measure), options.cells):
        precise = step is check or options.device == "cpu"
        torch.set_float32_matmul_precision("highest" if precise else options.precision)
        torch.backends.cudnn.allow_tf32 = not precise
        step(options, cell)


if __name__ == "__main__":
    main()
