"""Training speed of each cell, relative to the LSTM: PPO's learning and collection of one batch; results/cells.csv.

Each cell has its own learner on masked CartPole, as in ``recurl train ppo``. All are first checked against the loop
backend in float64 and warmed up, and then measured in turn; results are medians. Learning is 4 epochs of 4 minibatches
over the batch; collection steps the environments and the policy one step at a time. Usage::

    python benchmarks/bench_cells.py --num-envs 8 --threads 2                 # a CPU
    python benchmarks/bench_cells.py --num-envs 1024 --device cuda            # a GPU
    python benchmarks/bench_cells.py --cells lstm "rglru(conv_width=4)" --num-layers 2
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import recurl
from recurl.core.errors import RecurlError
from recurl.diagnostics import RNNCase, time_rnn
from recurl.recurrence import CELLS, record_backends
from recurl.trainers import PPO, PPOConfig
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "cells.csv"
LARGEST_ERROR = 1e-3  # for the gradient with the most cancellation


def main() -> None:
    """Check and time the cells, and print the results."""
    options = arguments()
    torch.set_num_threads(options.threads)
    runs = {cell: Run(cell, options) for cell in options.cells if is_right(cell, options)}
    if "lstm" not in runs:
        sys.exit("Without the LSTM there is nothing to compare with: no numbers.")
    for _ in range(options.warmup):
        for run in runs.values():
            run.turn()
    for run in runs.values():
        run.times = []
    for _ in range(options.rounds):
        for run in runs.values():
            run.turn()
    rows = {cell: run.row(runs["lstm"]) for cell, run in runs.items()}
    for run in runs.values():
        run.learner.close()
    print(f"{'cell':24} {'backend':8} {'learns':>12} {'x LSTM':>7} {'collects':>12} {'x LSTM':>7}   tokens/s")
    for cell, row in rows.items():
        append(RESULTS, row)
        numbers = f"{row['learn_tokens_per_s']:>12} {row['learn_vs_lstm']:>7} "
        numbers += f"{row['collect_tokens_per_s']:>12} {row['collect_vs_lstm']:>7}"
        print(f"{cell:24} {row['backend']:8} {numbers}")


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rollout-steps", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=1)
    parser.add_argument("--backend", default="fastest")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    return parser.parse_args()


def is_right(cell: str, options: argparse.Namespace) -> bool:
    """Return whether features and gradients equal those of the loop in float64; print the error if not."""
    sizes = {"input_size": options.hidden_size, "hidden_size": options.hidden_size, "num_layers": options.num_layers}
    case = RNNCase(cell=cell, **sizes, batch=4, time=64, mean_segment=20, device=options.device)
    try:
        (result,) = time_rnn(case, (options.backend,), repeats=1)
    except RecurlError as error:
        print(f"{cell} is left out: {error}")
        return False
    if result.reason is None and result.error <= LARGEST_ERROR:
        return True
    print(f"{cell} is left out: {result.reason or f'relative error {result.error:.1e}'}")
    return False


class Run:
    """The learner of one cell."""

    def __init__(self, cell: str, options: argparse.Namespace) -> None:
        self.options = options
        self.cell = cell
        config = PPOConfig(
            env="recurl/MaskedCartPole-v1",
            cell=cell,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            shared_trunk=True,
            num_envs=options.num_envs,
            rollout_steps=options.rollout_steps,
            backend=options.backend,
            device=options.device,
            threads=options.threads,
            cuda_graph=False,
            compile=False,
            total_steps=10**9,
        )
        self.learner = PPO(config)
        self.times: list[tuple[float, float]] = []
        self.backends: set[str] = set()

    def turn(self) -> None:
        """Collect a batch and learn from it."""
        start = self._now()
        batch = self.learner.collect()
        between = self._now()
        with record_backends() as ran:
            self.learner.learn(batch)
        self.times.append((between - start, self._now() - between))
        self.backends |= set(ran)

    def _now(self) -> float:
        if self.options.device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def row(self, lstm: Run) -> dict[str, Any]:
        """Return the results, compared with the LSTM."""
        options = self.options
        tokens = options.num_envs * options.rollout_steps
        collect, learn = (statistics.median(column) for column in zip(*self.times, strict=True))
        pairs = list(zip(self.times, lstm.times, strict=True))
        ratios = [statistics.median(other[part] / own[part] for own, other in pairs) for part in range(2)]
        name = torch.cuda.get_device_name() if options.device != "cpu" else f"{platform.machine()} CPU"
        return {
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "device": name,
            "recurl": recurl.__version__,
            "torch": torch.__version__,
            "threads": options.threads,
            "num_envs": options.num_envs,
            "rollout_steps": options.rollout_steps,
            "hidden_size": options.hidden_size,
            "num_layers": options.num_layers,
            "cell": self.cell,
            "parameters": sum(parameter.numel() for parameter in self.learner.agent.parameters()),
            "backend": "+".join(sorted(self.backends)) or "in a graph",
            "learn_tokens_per_s": round(tokens / learn),
            "learn_vs_lstm": f"{ratios[1]:.2f}",
            "collect_tokens_per_s": round(tokens / collect),
            "collect_vs_lstm": f"{ratios[0]:.2f}",
        }


if __name__ == "__main__":
    main()
