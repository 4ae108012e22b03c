"""A step of a whole policy on the CPU, compiled or not; appends to results/acting.csv.

The policy is that of a PPO run: encoder, normalization, memory, head and sampler, during collection with 1, 8 and 64
environments. It runs module by module on TensorDicts, lowered (module by module on tensors) and compiled (one call of
the C++ library). For one environment, ``predict`` of the loaded policy is also compared with its ``compiled()``. Times
are CPU time of the process, with one thread; variants are measured in turn. Usage::

    python benchmarks/bench_acting.py
    python benchmarks/bench_acting.py --cells gru --env recurl/MaskedPendulum-v1
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from bench_rnn_cpu import machine
from recurl.execution.compiled import CompiledNetwork
from recurl.execution.lowering import Entries, Network
from recurl.sequences.mode import ExplorationType, set_exploration_type, set_recurrent_mode
from recurl.trainers import PPO, PPOConfig
from recurl.trainers.algorithms.environment import make_env, with_spaces
from recurl.trainers.policies.converter import Converter
from recurl.trainers.policies.policy import Policy
from recurl.trainers.policies.steps import AgentStep
from results_file import append

RESULTS = Path(__file__).parent / "results" / "acting.csv"


def main() -> None:
    """Measure every requested combination."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="recurl/MaskedCartPole-v1")
    parser.add_argument("--cells", nargs="+", default=["lstm", "gru"])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=100, help="calls per round")
    options = parser.parse_args()
    tests = Path(__file__).parents[1] / "tests" / "compiled"
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(tests)], check=False).returncode:
        sys.exit("The tests of compiled steps fail: no numbers before they pass.")
    torch.set_num_threads(1)
    for cell in options.cells:
        for rows in options.num_envs:
            config = PPOConfig(
                env=options.env, cell=cell, hidden_size=options.hidden, num_envs=rows, threads=1, device="cpu"
            )
            report(options, cell, rows, times(collecting(config), options))
        config = PPOConfig(env=options.env, cell=cell, hidden_size=options.hidden, num_envs=1, threads=1, device="cpu")
        report(options, cell, 1, times(predicting(config), options))


def collecting(config: PPOConfig) -> dict[str, Callable[[], object]]:
    """Return the three variants of a step during collection."""
    learner = PPO(config)
    learner.collect()
    policy, root = learner.collector.policy, learner.collector._root
    network = Network([policy])
    compiled, entries, tensordict = CompiledNetwork(network), Entries.of(root), Entries.of(root).to_tensordict()
    return {
        "tensordict": lambda: policy(tensordict.copy()),
        "lowered": lambda: network(entries.copy()),
        "compiled": lambda: compiled(entries.copy()),
    }


def predicting(config: PPOConfig) -> dict[str, Callable[[], object]]:
    """Return the two variants of a step of a loaded policy."""
    learner = PPO(config)
    with make_env(config, 1, policy=learner.agent.actor) as envs:
        inner = with_spaces(envs)
        policy = Policy(AgentStep(learner.agent.eval().requires_grad_(False), envs), Converter(*inner.readers), "it")
    act, observation = policy.compiled(), np.asarray(policy.observation_space.sample(), np.float32)
    state = act(observation)[1]
    return {
        "predict": lambda: policy.predict(observation, state),
        "predict_compiled": lambda: act(observation, state),
    }


def times(calls: dict[str, Callable[[], object]], options: argparse.Namespace) -> dict[str, float]:
    """Return the median microseconds of each call, measured in rounds."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad(), set_recurrent_mode(False), set_exploration_type(ExplorationType.RANDOM):
        for _ in range(options.rounds):
            for name, call in calls.items():
                start = time.process_time()
                for _ in range(options.calls):
                    call()
                taken[name].append((time.process_time() - start) / options.calls * 1e6)
    return {name: statistics.median(values) for name, values in taken.items()}


def report(options: argparse.Namespace, cell: str, rows: int, medians: dict[str, float]) -> None:
    """Append a row for each variant and print it."""
    last = next(reversed(medians))
    for name, value in medians.items():
        row = {**machine(), "env": options.env, "cell": cell, "H": options.hidden, "B": rows, "way": name}
        row |= {"us": f"{value:.1f}", "over_compiled": f"{value / medians[last]:.2f}"}
        append(RESULTS, row)
        print(cell, rows, name, row["us"], row["over_compiled"], flush=True)


if __name__ == "__main__":
    main()
