"""GradientStep compared with Adam(fused=True) and clip_grad_norm_ on the CPU; appends to results/gradient_step.csv.

Only the part after the loss is timed: a backward pass that returns given gradients, clipping, and Adam. Both variants
have the same parameters, those of a run's actor and critic. They are compared after 100 steps, and nothing is printed
if they differ. Unlike ``GradientStep``, the usual variant also takes a step if the gradient isn't finite. Times are CPU
time of the process, with one thread, measured in turn; the ratio is the median over turns. Usage::

    python benchmarks/bench_gradient_step.py --hidden 16 64 256
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench_rnn_cpu import machine
from recurl.core import specs
from recurl.trainers import PPO, GradientStep, PPOConfig
from results_file import append

RESULTS = Path(__file__).parent / "results" / "gradient_step.csv"
RATE, NORM, EPS = 1e-3, 0.5, 1e-5
TOLERANCE = 1e-6


class Given(torch.autograd.Function):
    """Loss with given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        """Return a scalar."""
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the given gradients."""
        return None, *(gradient.clone() for gradient in ctx.gradients)


def main() -> None:
    """Measure every requested size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20, help="calls per round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for hidden in options.hidden:
        measure(hidden, options)


def measure(hidden: int, options: argparse.Namespace) -> None:
    """Check, time and record one size."""
    torch.manual_seed(0)
    config = PPOConfig(env="none", hidden_size=hidden)
    observation = specs.Composite({"observation": specs.Unbounded(8, 4)}, shape=(8,))
    agent = PPO.make_agent(config, observation, specs.Categorical(2))
    gradients = [torch.randn_like(parameter) for parameter in agent.parameters()]
    networks = [agent, copy.deepcopy(agent)]
    calls = [kind(network, gradients) for kind, network in zip((ours, usual), networks, strict=True)]
    for _ in range(100):
        for call in calls:
            call()
    for one, other in zip(*(network.parameters() for network in networks), strict=True):
        if not torch.allclose(one, other, atol=TOLERANCE):
            sys.exit("The parameters differ: no numbers.")
    times = [[timed(call, options.calls) for call in calls] for _ in range(options.rounds)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    ratio = statistics.median(one / other for one, other in times)
    write({"H": hidden, "tensors": len(gradients)}, medians, ratio)


def ours(network: nn.Module, gradients: list[Tensor]) -> Callable[[], Any]:
    """Return the step used by the trainers."""
    parameters = list(network.parameters())
    step = GradientStep(parameters, learning_rate=RATE, max_norm=NORM, eps=EPS)
    return lambda: step(Given.apply(gradients, *parameters))


def usual(network: nn.Module, gradients: list[Tensor]) -> Callable[[], Any]:
    """Return the same step with torch's public API."""
    parameters = list(network.parameters())
    adam = torch.optim.Adam(parameters, lr=RATE, eps=EPS, fused=True)

    def call() -> None:
        adam.zero_grad()
        Given.apply(gradients, *parameters).backward()
        nn.utils.clip_grad_norm_(parameters, NORM)
        adam.step()

    return call


def timed(call: Callable[[], Any], calls: int) -> float:
    """Return the microseconds of one call."""
    start = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - start) / calls * 1e6


def write(case: dict[str, int], medians: list[float], ratio: float) -> None:
    """Append a row to the results and print it."""
    named = dict(zip(("gradient_step_us", "adam_and_clip_us"), (f"{value:.1f}" for value in medians), strict=True))
    row = {**machine(), **case, **named, "ratio": f"{ratio:.2f}"}
    append(RESULTS, row)
    print(*(f"{name}={value}" for name, value in list(row.items())[5:]), flush=True)


if __name__ == "__main__":
    main()
