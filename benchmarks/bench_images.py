"""Recurrent PPO on images, compared with SB3-Contrib in frames per second: appends to results/images.csv.

Both use the same network: Nature DQN's convolutions on four frames of 84x84, 512 features, an LSTM of size 256 shared
by actor and critic (``sb3`` gives the critic its own, its default), and two heads; 8 environments x 128 steps, 4 epochs
x 4 minibatches, one thread. The cost of the environment is negligible. The procedure is that of bench_ppo.py;
peers/README.md describes the installation of the peer. Usage::

    python benchmarks/bench_images.py --python peers=~/peers/bin/python
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench_ppo import append, check_tests, speed

RESULTS = Path(__file__).resolve().parent / "results" / "images.csv"


def main() -> None:
    """Measure and print frames per second."""
    options = parse()
    check_tests("networks")
    for rows in options.num_envs:
        found = speed(rows, options)
        for row in found:
            append(RESULTS, row)
        for row in found:
            rates = [1e6 / float(str(row[f"{what}_us"])) for what in ("train", "collect")]
            print(f"{row['system']:12s} {rates[0]:8.0f} frames/s training, {rates[1]:8.0f} collecting", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[8])
    parser.add_argument(
        "--systems", nargs="+", choices=("recurl", "sb3", "sb3-shared"), default=["recurl", "sb3-shared"]
    )
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=PATH", help="Python interpreter of peers")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--steps", type=int, default=1024, help="environment steps of a round; of recurl 4 x")
    parser.add_argument("--warmup", type=int, default=1024, help="environment steps before")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=256)
    options = parser.parse_args()
    options.task, options.solve, options.rollout_steps = "frames", 0, 128
    options.python = {"recurl": sys.executable, **dict(entry.split("=", 1) for entry in options.python)}
    return options


if __name__ == "__main__":
    main()
