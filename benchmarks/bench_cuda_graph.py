"""A PPO training step (forward, loss, backward, clipping, Adam) as one CUDA graph, compared with the eager step.

Both train copies of the same agent on the same batches. First the losses and all parameters are compared after 8 steps
on 4 batches with different resets and states; nothing is timed if they differ. Then medians of wall time, including
waiting for the GPU. Appends to results/cuda_graph.csv. Usage::

    python benchmarks/bench_cuda_graph.py
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from recurl import __version__, specs
from recurl.execution.lowering import Entries
from recurl.objectives import ClipPPOLoss
from recurl.trainers import PPO, ActorCritic, CudaGraphStep, GradientStep, PPOConfig
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "cuda_graph.csv"
FEATURES, ACTIONS = 8, 4
CASES = [
    ("lstm", 64, 64, 32),
    ("gru", 64, 64, 32),
    ("lstm", 128, 256, 32),
    ("gru", 128, 256, 32),
    ("lstm", 256, 512, 64),
    ("gru", 256, 512, 64),
    ("none", 128, 256, 32),
]


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    options = parser.parse_args()
    for case in CASES:
        measure(*case, options)


def measure(cell: str, hidden: int, rows: int, length: int, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = PPOConfig(env="none", cell=cell, hidden_size=hidden, device="cuda")
    agent = make_agent(config)
    batches = [make_batch(agent, rows * length, length) for _ in range(4)]
    step, eager_agent = make_step(agent, config, graph=False)
    graphed, graph_agent = make_step(agent, config, graph=True)
    loss = parameter = 0.0
    for index in range(8):
        expected, found = step(batches[index % 4]), graphed(batches[index % 4])
        loss = max(loss, (found - expected).abs().max().item())
    for expected, found in zip(eager_agent.parameters(), graph_agent.parameters(), strict=True):
        parameter = max(parameter, (found - expected).abs().max().item())
    if not max(loss, parameter) <= 1e-5:
        sys.exit(f"{cell} {hidden}: graph and eager step differ, losses by {loss:.1e}, parameters by {parameter:.1e}.")
    times: dict[str, list[float]] = {"eager": [], "graph": []}
    for index in range(options.repeats):
        for name, run in (("eager", step), ("graph", graphed)):
            times[name].append(wall(lambda run=run, index=index: run(batches[index % 4])))
    medians = {name: statistics.median(values) for name, values in times.items()}
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "recurl": __version__,
        "torch": torch.__version__,
        "cell": cell,
        "H": hidden,
        "rows": rows,
        "steps": length,
        "eager_ms": f"{medians['eager']:.3f}",
        "graph_ms": f"{medians['graph']:.3f}",
        "eager_over_graph": f"{medians['eager'] / medians['graph']:.2f}",
        "loss_difference": f"{loss:.1e}",
        "parameter_difference": f"{parameter:.1e}",
        "repeats": options.repeats,
    }
    print(*(f"{key}={value}" for key, value in list(row.items())[5:]), flush=True)
    append(options.csv, row)


def make_agent(config: PPOConfig) -> ActorCritic:
    observation = specs.Composite({"observation": specs.Unbounded(1, FEATURES)}, shape=(1,))
    return PPO.make_agent(config, observation, specs.Categorical(ACTIONS)).to(config.device)


def make_step(agent: ActorCritic, config: PPOConfig, *, graph: bool) -> tuple[Callable[[Entries], Tensor], ActorCritic]:
    """Return the step of recurl's PPO on a copy of the agent."""
    agent = copy.deepcopy(agent)
    loss = ClipPPOLoss(agent.actor, agent.critic, loss_critic_type="l2", normalize_advantage=True)
    optimizer = GradientStep(agent.parameters(), learning_rate=1e-3, max_norm=0.5, eps=1e-5, capturable=graph)

    def step(batch: Entries) -> Tensor:
        losses = loss.tensors(batch)
        norm = optimizer(losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"])
        return torch.stack([*(value.detach() for value in losses.values()), norm])

    return (CudaGraphStep(step, agent, optimizer.optimizer) if graph else step), agent


def make_batch(agent: ActorCritic, tokens: int, length: int) -> Entries:
    """Return a minibatch of slices with resets, as in PPO."""
    device = next(agent.parameters()).device
    is_init = torch.rand(tokens, 1, device=device) < 0.02
    is_init[::length] = True
    states = {
        key: torch.randn(tokens, 1, agent.critic[-1].module.in_features, device=device) * 0.3
        for key in agent.actor.in_keys
        if "state_" in key
    }
    return Entries.of(
        TensorDict(
            {
                "observation": torch.randn(tokens, FEATURES, device=device),
                "action": torch.randint(ACTIONS, (tokens,), device=device),
                "action_log_prob": torch.full((tokens,), -1.386, device=device),
                "advantage": torch.randn(tokens, 1, device=device),
                "value_target": torch.randn(tokens, 1, device=device),
                "is_init": is_init,
                **states,
            },
            [tokens],
        )
    )


def wall(call: Callable[[], object]) -> float:
    """Return the milliseconds until the GPU has finished."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    main()
