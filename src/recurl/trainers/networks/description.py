"""Human-readable summary of the networks of a run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from recurl.core import specs
from recurl.core.keys import dotted
from recurl.trainers.networks.agent import Agent
from recurl.trainers.networks.observations import Entry, Observations


def describe_agent(agent: Agent) -> str:
    """Return a table of the observations and a table of the layers with their parameter counts.

    Example:
        >>> from recurl.trainers import PPO, PPOConfig
        >>> from recurl.core import specs
        >>> spec = specs.Composite({"observation": specs.Unbounded(3)})
        >>> agent = PPO.make_agent(PPOConfig(env="none", cell="gru", hidden_size=4), spec, specs.Categorical(2))
        >>> print(describe_agent(agent))
        observations
          observation  float32 [3]  numbers, standardized
        layers
          actor.0.0.layer  Linear(in_features=3, out_features=4, bias=True)  16
          actor.0.1.gru    CellNet(4, 4, batch_first=True)                   120
          actor.0.2        Linear(in_features=4, out_features=2, bias=True)  10
          critic.2         Linear(in_features=4, out_features=1, bias=True)  5
        151 parameters
    """
    actors = agent.observations.keys
    observed = _table(
        [
            (dotted(entry.key), _kind(entry), how if entry.key in actors else f"{how}, critic only")
            for entry, how in _observed(agent.all_observations)
        ]
    )
    layers = _table([(name, str(layer), f"{_size(layer):,}") for name, layer in _layers(agent)])
    return "\n".join(["observations", *observed, "layers", *layers, f"{_total(agent):,} parameters"])


def _kind(entry: Entry) -> str:
    return f"{str(entry.spec.dtype).removeprefix('torch.')} {list(entry.shape)}"


def _observed(observations: Observations) -> Iterator[tuple[Entry, str]]:
    """Yield each observed entry with a description of its encoding."""
    for image in observations.images:
        yield image.entry, f"image, {image.layout}"
    for entry in [] if observations.flat is None else observations.flat.entries:
        yield entry, _encoding(entry, standardized=observations.norm is not None)


def _encoding(entry: Entry, *, standardized: bool) -> str:
    if isinstance(entry.spec, specs.Categorical | specs.MultiCategorical | specs.OneHot):
        return "choices"
    if isinstance(entry.spec, specs.Binary) or entry.spec.dtype == torch.bool:
        return "bits"
    if entry.spec.dtype == torch.uint8:
        return "numbers from 0 to 1"
    return "numbers, standardized" if standardized else "numbers"


def _layers(agent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module that holds parameters once, its name stripped of the segments that TensorDict modules add."""
    seen = set[nn.Module]()
    for name, module in agent.named_modules():
        if module not in seen and any(True for _ in module.parameters(recurse=False)):
            seen.add(module)
            yield name.replace("module.", "").removesuffix(".module"), module


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


def _total(agent: nn.Module) -> int:
    return sum(parameter.numel() for parameter in agent.parameters())


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
