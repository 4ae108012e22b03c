"""rsl_rl's recurrent models rebuilt from its documented layout, so that tests need no rsl_rl.

``Model`` is the ``RNNModel`` of versions 4 and 5, ``ActorCritic`` the ``ActorCriticRecurrent`` of versions 1 to 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

HIDDEN = (16, 12)


class EmpiricalNormalization(nn.Module):
    """Statistics of the observations."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._mean = nn.Buffer(torch.zeros(1, size))
        self._var = nn.Buffer(torch.ones(1, size))
        self._std = nn.Buffer(torch.ones(1, size))
        self.count = nn.Buffer(torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self._mean) / (self._std + 1e-2)

    def update(self, x: Tensor) -> None:
        self.count += len(x)
        rate = len(x) / self.count
        delta = x.mean(0, keepdim=True) - self._mean
        self._mean += rate * delta
        var = x.var(0, correction=0, keepdim=True)
        self._var += rate * (var - self._var + delta * (x.mean(0, keepdim=True) - self._mean))
        self._std = self._var.sqrt()


class Memory(nn.Module):
    """Recurrent layers that keep their state."""

    def __init__(self, cell: str, inputs: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.rnn = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](inputs, hidden, layers)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out, self.state = self.rnn(x.unsqueeze(0), self.state)
        return out.squeeze(0)

    def reset(self, dones: Tensor) -> None:
        if self.state is not None:
            for state in self.state if isinstance(self.state, tuple) else (self.state,):
                state[..., dones, :] = 0.0


def mlp(inputs: int, outputs: int, activation: nn.Module, hidden: Sequence[int] = HIDDEN) -> nn.Sequential:
    sizes = (inputs, *hidden)
    layers = [layer for a, b in zip(sizes, hidden, strict=False) for layer in (nn.Linear(a, b), activation)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


class Gaussian(nn.Module):
    """Distribution of version 5."""

    def __init__(self, size: int, log: bool) -> None:
        super().__init__()
        value = nn.Parameter(torch.rand(size) - 1.0 if log else torch.rand(size) + 0.5)
        self.register_parameter("log_std_param" if log else "std_param", value)

    @property
    def std(self) -> Tensor:
        return self.log_std_param.exp() if hasattr(self, "log_std_param") else self.std_param


class Model(nn.Module):
    """A model of version 5; the state dict of version 4 differs in the names of the standard deviation."""

    def __init__(
        self,
        cell: str,
        inputs: int,
        outputs: int,
        *,
        hidden: int = 8,
        layers: int = 1,
        norm: bool = True,
        stochastic: bool = False,
        log: bool = False,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.obs_normalizer = EmpiricalNormalization(inputs) if norm else nn.Identity()
        self.distribution = Gaussian(outputs, log) if stochastic else None
        self.mlp = mlp(hidden, outputs, activation or nn.ELU())
        self.rnn = Memory(cell, inputs, hidden, layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.rnn(self.obs_normalizer(x)))

    def normal(self, mean: Tensor) -> Normal:
        return Normal(mean, self.distribution.std)

    def reset(self, dones: Tensor) -> None:
        self.rnn.reset(dones)


class ActorCritic(nn.Module):
    """Both networks of versions 1 to 3 with the weights of two models."""

    def __init__(self, actor: Model, critic: Model, *, norms: bool) -> None:
        super().__init__()
        self.memory_a, self.memory_c = actor.rnn, critic.rnn
        self.actor, self.critic = actor.mlp, critic.mlp
        if norms:
            self.actor_obs_normalizer, self.critic_obs_normalizer = actor.obs_normalizer, critic.obs_normalizer
        name, value = next(iter(actor.distribution.named_parameters()))
        self.register_parameter(name.removesuffix("_param"), value)


def checkpoint(actor: Model, critic: Model, version: int) -> dict[str, Any]:
    """Return what the runner of a version saves."""
    parameters = [*actor.parameters(), *critic.parameters()]
    about = {"optimizer_state_dict": torch.optim.Adam(parameters).state_dict(), "iter": 7, "infos": None}
    if version < 4:
        states: dict[str, Any] = {"model_state_dict": ActorCritic(actor, critic, norms=version > 2).state_dict()}
        if version == 2:
            states["obs_norm_state_dict"] = actor.obs_normalizer.state_dict()
            states["privileged_obs_norm_state_dict"] = critic.obs_normalizer.state_dict()
        return states | about
    states = {"actor_state_dict": actor.state_dict(), "critic_state_dict": critic.state_dict()}
    if version == 4:
        states["actor_state_dict"] = {
            name.replace("distribution.", "").replace("_param", ""): value
            for name, value in states["actor_state_dict"].items()
        }
    return states | about


def load(contents: dict[str, Any], actor: Model, critic: Model, version: int) -> None:
    """Load a checkpoint as the runner of a version does."""
    parameters = [*actor.parameters(), *critic.parameters()]
    torch.optim.Adam(parameters).load_state_dict(contents["optimizer_state_dict"])
    assert {"iter", "infos"} <= contents.keys()
    if version < 4:
        ActorCritic(actor, critic, norms=version > 2).load_state_dict(contents["model_state_dict"])
        if version == 2:
            actor.obs_normalizer.load_state_dict(contents["obs_norm_state_dict"])
            critic.obs_normalizer.load_state_dict(contents["privileged_obs_norm_state_dict"])
        return
    state = contents["actor_state_dict"]
    if version == 4:
        names = {"std": "distribution.std_param", "log_std": "distribution.log_std_param"}
        state = {names.get(name, name): value for name, value in state.items()}
    actor.load_state_dict(state)
    critic.load_state_dict(contents["critic_state_dict"])
