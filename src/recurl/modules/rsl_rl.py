"""Conversion of rsl_rl's recurrent checkpoints to actors and critics of recurl, and back. rsl_rl is not needed.

In rsl_rl, actor and critic each normalize their observations, run an LSTM or GRU, and end with an MLP: for the mean of
a normal distribution, whose standard deviation is a parameter, and for the value. Its versions 4 and 5 save the two
models one by one, versions 1 to 3 save one ``ActorCriticRecurrent``; both layouts are read and written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, cast

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from recurl.core.archive import load_archive
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import NestedKey, next_key, normalize_key
from recurl.execution.lowering import modules_in_order
from recurl.modules.actors import ProbabilisticActor, Sampler, ValueOperator
from recurl.modules.joint import IndependentNormal
from recurl.modules.lstm_gru import GRUModule, LSTMModule
from recurl.modules.networks import MLP, LearnedScale
from recurl.modules.normalization import ObservationNorm
from recurl.modules.recurrent import RecurrentModule

__all__ = ["JoinedObservations", "from_rsl_rl", "to_rsl_rl"]

_State = dict[str, Tensor]
_Role = Literal["actor", "critic"]
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "selu": nn.SELU,
    "relu": nn.ReLU,
    "crelu": nn.CELU,
    "lrelu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
    "swish": nn.SiLU,
    "mish": nn.Mish,
    "identity": nn.Identity,
}
_NORM_EPS = 1e-2  # of rsl_rl's EmpiricalNormalization
_MODULES: dict[int, type[LSTMModule | GRUModule]] = {4: LSTMModule, 3: GRUModule}  # by number of gates
_RNN, _MLP, _NORM = "rnn.rnn.", "mlp.", "obs_normalizer."
_MOMENTS = ("_mean", "_var", "_std", "count")
_STD, _LOG_STD = "distribution.std_param", "distribution.log_std_param"
_STD_BEFORE_5 = {_STD: "std", _LOG_STD: "log_std"}
# Prefixes of the parts in ActorCriticRecurrent of versions 1 to 3, which hold normalizers from version 3 on.
_OF_ROLE: dict[_Role, dict[str, str]] = {
    "actor": {_RNN: "memory_a.rnn.", _MLP: "actor.", _NORM: "actor_obs_normalizer.", **_STD_BEFORE_5},
    "critic": {_RNN: "memory_c.rnn.", _MLP: "critic.", _NORM: "critic_obs_normalizer."},
}
_NORMS_OF_2: dict[_Role, str] = {"actor": "obs_norm_state_dict", "critic": "privileged_obs_norm_state_dict"}
_OLDEST_WITH_MODELS, _OLDEST_WITH_NORMS, _VERSIONS = 4, 3, (2, 3, 4, 5)


class JoinedObservations(nn.Module):
    """Vectors of observations, concatenated and normalized.

    Args:
        norm: normalization of the whole vector, or None.

    Shapes:
        one ``[..., n_i]`` per entry to ``[..., sum of n_i]``.

    Example:
        >>> JoinedObservations()(torch.zeros(5, 2), torch.zeros(5, 3)).shape
        torch.Size([5, 5])
    """

    def __init__(self, norm: ObservationNorm | None = None) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the vector."""
        joined = torch.cat(observations, -1)
        return joined if self.norm is None else self.norm(joined)

    def update(self, *observations: Tensor) -> None:
        """Update the statistics, if there are any, with a batch of observations ``[..., n_i]``."""
        if self.norm is not None:
            self.norm.update(torch.cat(observations, -1))


def from_rsl_rl(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any],
    *,
    observations: NestedKey | Sequence[NestedKey] = "policy",
    critic_observations: NestedKey | Sequence[NestedKey] | None = None,
    activation: str = "elu",
    recurrent_backend: str = "fastest",
) -> tuple[ProbabilisticActor, TensorDictSequential]:
    """Build the actor and the critic that a checkpoint of rsl_rl's recurrent PPO holds.

    They are ordinary modules: for ``Collector`` and ``ClipPPOLoss``, and for ``recurl.export_policy``. Outside of
    collectors, the actor takes the mean action, as rsl_rl's inference policy does. Statistics of normalizers are
    carried; to go on updating them, call ``update`` of their :class:`JoinedObservations` between batches. The state of
    the optimizer and of random network distillation is not read.

    Args:
        checkpoint: file written by rsl_rl's ``OnPolicyRunner`` (``model_1500.pt``), of versions 1 to 5, or its
            contents. Code in it is not run.
        observations: groups of observations that the actor reads, in the order of rsl_rl's ``obs_groups``, as the
            checkpoint doesn't name them. By default ``"policy"``.
        critic_observations: those of the critic; the same as the actor's by default.
        activation: activation of the MLPs, by rsl_rl's name, as the checkpoint doesn't hold it either.
        recurrent_backend: see :class:`~recurl.modules.LSTMModule`.

    Returns:
        The actor, which writes ``"action"`` and ``"action_log_prob"``, and the critic, which writes ``"state_value"``.
        Their states are ``"actor_state_h"``, ``"critic_state_h"`` and, of an LSTM, also ``_c``.

    Raises:
        ArgumentError: the file can't be read or isn't such a checkpoint, or the activation is unknown.
        UnsupportedError: the networks can't be converted, such as convolutions, networks without memory, and standard
            deviations that depend on the state.

    Example:
        >>> from torch import nn
        >>> from recurl.modules.rsl_rl import from_rsl_rl, to_rsl_rl
        >>> lstm = {f"rnn.{name}": value for name, value in nn.LSTM(3, 8).state_dict(prefix="rnn.").items()}
        >>> models = [nn.Sequential(nn.Linear(8, 16), nn.ELU(), nn.Linear(16, size)) for size in (2, 1)]
        >>> actor, critic = ({**lstm, **model.state_dict(prefix="mlp.")} for model in models)
        >>> actor["distribution.std_param"] = torch.ones(2)
        >>> actor, critic = from_rsl_rl({"actor_state_dict": actor, "critic_state_dict": critic})
        >>> actor.in_keys
        ['policy', 'actor_state_h', 'actor_state_c', 'is_init']
        >>> sorted(to_rsl_rl(actor, critic))
        ['actor_state_dict', 'critic_state_dict', 'infos', 'iter', 'optimizer_state_dict']
    """
    if activation.lower() not in _ACTIVATIONS:
        raise ArgumentError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}.")
    contents = checkpoint if isinstance(checkpoint, Mapping) else _load(Path(checkpoint))
    states = _states_in(contents)
    actor_keys = _keys(observations)
    critic_keys = actor_keys if critic_observations is None else _keys(critic_observations)
    kind = _ACTIVATIONS[activation.lower()]
    parts = {role: _Parts.of(state, role) for role, state in states.items()}
    actor, critic = parts["actor"], parts["critic"]
    if actor.std is None:
        _refuse(
            "the actor's standard deviation is not a parameter (state-dependent, or another distribution than the "
            "Gaussian, such as Beta)"
        )
    name, std = actor.std
    scale = LearnedScale(len(std), log=name == _LOG_STD).to(std.dtype)
    scale.value.data.copy_(std)
    trunk = _trunk(actor, "actor", actor_keys, recurrent_backend)
    net = nn.Sequential(_mlp(actor, kind), scale)
    head = TensorDictModule(net, in_keys=["actor_memory"], out_keys=["loc", "scale"])
    value = ValueOperator(_mlp(critic, kind), in_keys=["critic_memory"])
    return (
        ProbabilisticActor(
            TensorDictSequential(*trunk, head),
            in_keys=["loc", "scale"],
            distribution_class=IndependentNormal,
            return_log_prob=True,
        ),
        TensorDictSequential(*_trunk(critic, "critic", critic_keys, recurrent_backend), value),
    )


def to_rsl_rl(
    actor: TensorDictModuleBase,
    critic: TensorDictModuleBase,
    *,
    version: int = 5,
    learning_rate: float = 1e-3,
) -> dict[str, Any]:
    """Return a checkpoint of rsl_rl's recurrent PPO with the weights and statistics of an actor and a critic.

    ``torch.save(to_rsl_rl(actor, critic), "model_0.pt")`` writes a file for ``OnPolicyRunner.load``, at iteration 0,
    with a new optimizer. Sizes and activation must be those of the runner's configuration.

    Args:
        actor: actor like those of :func:`from_rsl_rl`: optionally :class:`JoinedObservations`, then an ``LSTMModule``
            or ``GRUModule`` (or a ``CellModule`` of these cells), linear layers with activations in between, a
            :class:`~recurl.modules.LearnedScale`, and a sampler of :class:`~recurl.modules.IndependentNormal`.
        critic: critic of the same kind, without scale and sampler.
        version: major version of rsl_rl that reads the checkpoint, 2 to 5. Version 1 reads those of 2 without
            normalization.
        learning_rate: learning rate of the new optimizer.

    Raises:
        ArgumentError: the version is unknown.
        UnsupportedError: rsl_rl has no such network; the message names what differs. This includes those of runs of
            recurl, which encode the observations before the memory.
    """
    if version not in _VERSIONS:
        raise ArgumentError(f"version must be one of {_VERSIONS}, got {version!r}.")
    states: dict[_Role, _State] = {"actor": _state_of(actor, "actor"), "critic": _state_of(critic, "critic")}
    found: dict[str, Any] = {}
    if version >= _OLDEST_WITH_MODELS:
        names = {} if version > _OLDEST_WITH_MODELS else _STD_BEFORE_5
        for role, state in states.items():
            found[f"{role}_state_dict"] = {names.get(name, name): value for name, value in state.items()}
    else:
        found["model_state_dict"] = model = dict[str, Tensor]()
        for role, state in states.items():
            norm, rest = _taken(state, _NORM)
            if norm and version < _OLDEST_WITH_NORMS:
                found[_NORMS_OF_2[role]] = norm
            else:
                rest |= {_NORM + name: value for name, value in norm.items()}
            for name, value in rest.items():
                begin = next(begin for begin in _OF_ROLE[role] if name.startswith(begin))
                model[_OF_ROLE[role][begin] + name.removeprefix(begin)] = value
        if sum(name in found for name in _NORMS_OF_2.values()) == 1:
            _cannot_export("version 2 of rsl_rl normalizes the observations of both, actor and critic, or of none")
    weights = [value for state in states.values() for name, value in state.items() if not name.startswith(_NORM)]
    optimizer = torch.optim.Adam([nn.Parameter(weight) for weight in weights], lr=learning_rate)
    return {**found, "optimizer_state_dict": optimizer.state_dict(), "iter": 0, "infos": None}


# -- reading


def _load(path: Path) -> Mapping[str, Any]:
    contents = load_archive(path)
    if not isinstance(contents, Mapping):
        raise ArgumentError(f"{path} must hold a checkpoint of rsl_rl, a dict, got {type(contents).__name__}.")
    return cast(Mapping[str, Any], contents)


def _states_in(contents: Mapping[str, Any]) -> dict[_Role, _State]:
    """Return the states of actor and critic with the names of version 5."""
    if "model_state_dict" in contents:
        return _split(contents)
    if not {"actor_state_dict", "critic_state_dict"} <= contents.keys():
        raise ArgumentError(
            "A checkpoint of rsl_rl's PPO must have the entries actor_state_dict and critic_state_dict (versions 4 and "
            f"5), or model_state_dict (versions 1 to 3), got {sorted(map(str, contents))}."
        )
    names = {before: name for name, before in _STD_BEFORE_5.items()}
    states: dict[_Role, Mapping[str, Tensor]] = {role: contents[f"{role}_state_dict"] for role in _OF_ROLE}
    return {role: {names.get(name, name): value for name, value in state.items()} for role, state in states.items()}


def _split(contents: Mapping[str, Any]) -> dict[_Role, _State]:
    rest, states = dict(contents["model_state_dict"]), dict[_Role, _State]()
    for role, prefixes in _OF_ROLE.items():
        states[role] = state = _State()
        for begin, before in prefixes.items():
            part, rest = _taken(rest, before)
            state |= {begin + name: value for name, value in part.items()}
        norm = contents.get(_NORMS_OF_2[role]) or {}
        state |= {_NORM + name: value for name, value in norm.items()}
    if rest:
        _refuse(f"it also holds {_brief(rest)}")
    return states


class _Parts(NamedTuple):
    """Parts of a model: states of memory, MLP and normalizer, and the standard deviation with its name."""

    rnn: _State
    mlp: _State
    norm: _State
    std: tuple[str, Tensor] | None

    @classmethod
    def of(cls, state: _State, role: _Role) -> _Parts:
        rnn, rest = _taken(state, _RNN)
        mlp, rest = _taken(rest, _MLP)
        norm, rest = _taken(rest, _NORM)
        std = next(((name, rest.pop(name)) for name in (_STD, _LOG_STD) if name in rest), None)
        if any(name.startswith("cnn") for name in rest):
            _refuse(f"the {role} encodes images with convolutions")
        if rest:
            _refuse(f"the {role} also holds {_brief(rest)}")
        for part, name in ((rnn, "recurrent layers"), (mlp, "MLP")):
            if not part:
                _refuse(f"the {role} has no {name}")
        return cls(rnn, mlp, norm, std)


def _trunk(parts: _Parts, role: _Role, keys: list[NestedKey], backend: str) -> list[TensorDictModuleBase]:
    rnn = parts.rnn
    (rows, inputs), hidden = rnn["weight_ih_l0"].shape, rnn["weight_hh_l0"].shape[1]
    read, modules = keys[0], list[TensorDictModuleBase]()
    if parts.norm or len(keys) > 1:
        joined, read = JoinedObservations(_norm(parts.norm) if parts.norm else None), f"{role}_inputs"
        modules.append(TensorDictModule(joined, in_keys=cast(Any, keys), out_keys=[read]))
    kind = _MODULES[rows // hidden]
    states = [f"{role}_state_{name}" for name in ("h", "c")[: 2 if kind is LSTMModule else 1]]
    memory = kind(
        inputs,
        hidden,
        sum(name.startswith("weight_ih_l") for name in rnn),
        in_keys=[read, *states],
        out_keys=[f"{role}_memory", *map(next_key, states)],
        recurrent_backend=backend,
        dtype=rnn["weight_ih_l0"].dtype,
    )
    memory.net.load_state_dict(rnn)
    return [*modules, memory]


def _norm(state: _State) -> ObservationNorm:
    mean, var = state["_mean"].squeeze(0), state["_var"].squeeze(0)
    norm = ObservationNorm(mean.shape, clip=torch.inf, eps=0.0, std_eps=_NORM_EPS).to(mean.dtype)
    norm.set_moments(mean, var, int(state["count"]))
    return norm


def _mlp(parts: _Parts, activation: type[nn.Module]) -> MLP:
    weights = [value for name, value in parts.mlp.items() if name.endswith(".weight")]
    *hidden, last = (weight.shape[0] for weight in weights)
    net = MLP(weights[0].shape[1], last, num_cells=hidden, activation_class=activation).to(weights[0].dtype)
    net.load_state_dict(parts.mlp)
    return net


def _keys(keys: NestedKey | Sequence[NestedKey]) -> list[NestedKey]:
    if isinstance(keys, str | tuple):
        return [normalize_key(keys)]
    return [normalize_key(key) for key in keys]


def _taken(state: Mapping[str, Any], prefix: str) -> tuple[_State, _State]:
    """Return the entries that begin with ``prefix``, without it, and the others."""
    taken = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return taken, {name: value for name, value in state.items() if not name.startswith(prefix)}


def _brief(names: Mapping[str, Any]) -> str:
    first, *others = names
    return first if not others else f"{first} and {len(others)} more entries"


def _refuse(reason: str) -> NoReturn:
    raise UnsupportedError(
        f"The checkpoint of rsl_rl can't be converted: {reason}. Recurrent actors and critics with a standard "
        "deviation that is a parameter can be."
    )


# -- writing


def _state_of(network: TensorDictModuleBase, role: _Role) -> _State:
    """Return the state of an actor or a critic with the names of version 5."""
    parts = modules_in_order(network)
    places = [place for place, part in enumerate(parts) if isinstance(part, RecurrentModule)]
    if len(places) != 1:
        _cannot_export(f"the {role} must have one LSTM or GRU, and has {len(places)}")
    (place,) = places
    before, memory, after = parts[:place], cast(RecurrentModule, parts[place]), parts[place + 1 :]
    if role == "actor":
        *after, sampler = after or [memory]
        if not isinstance(sampler, Sampler) or sampler.distribution_class is not IndependentNormal:
            kind = getattr(getattr(sampler, "distribution_class", None), "__name__", type(sampler).__name__)
            _cannot_export(f"the actor must sample from IndependentNormal, not {kind}")
    layers = [layer for part in after for layer in _layers_of(part)]
    scale = layers.pop() if role == "actor" and layers else None
    if role == "actor" and not isinstance(scale, LearnedScale):
        _cannot_export("the actor's standard deviation must be a parameter (LearnedScale)")
    state = {f"{_RNN}{name}": value for name, value in _memory(memory, role).items()}
    for number, layer in enumerate(_checked(layers, role)):
        state |= {f"{_MLP}{number}.{name}": value for name, value in layer.state_dict().items()}
    state |= {f"{_NORM}{name}": value for name, value in _moments(before, role).items()}
    if isinstance(scale, LearnedScale):
        state[_LOG_STD if scale.log else _STD] = scale.value
    return {name: value.detach().clone() for name, value in state.items()}


def _memory(module: RecurrentModule, role: _Role) -> _State:
    net = module.net
    plain = net.bias and not (net.bidirectional or net.proj_size or net.dropout)
    if net.cell.name not in ("lstm", "gru") or not plain:
        _cannot_export(
            f"the {role}'s memory must be an LSTM or GRU with biases, without projection, dropout and second "
            f"direction, not {net}"
        )
    return dict(net.state_dict())


def _layers_of(part: nn.Module) -> Iterator[nn.Module]:
    inner = part.module if isinstance(part, TensorDictModule) else part
    if isinstance(inner, nn.Sequential):
        for layer in inner:
            yield from _layers_of(layer)
    else:
        yield cast(nn.Module, inner)


def _checked(layers: list[nn.Module], role: _Role) -> list[nn.Module]:
    """Return the layers of an MLP if rsl_rl has it."""
    linear, between = layers[::2], layers[1::2]
    kinds = {type(layer) for layer in between}
    fits = all(type(layer) is nn.Linear and "bias" in layer.state_dict() for layer in linear)
    fits = fits and len(linear) > len(between)
    if not fits or len(kinds) != 1 or not kinds <= {*_ACTIVATIONS.values()}:
        _cannot_export(
            f"after the memory, the {role} must have two or more linear layers with activations of one kind in between "
            f"({', '.join(_ACTIVATIONS)}), not {_kinds(layers) or 'nothing'}"
        )
    return layers


def _moments(before: list[TensorDictModuleBase], role: _Role) -> _State:
    inner = [layer for part in before for layer in _layers_of(part)]
    if not inner:
        return {}
    if len(inner) > 1 or not isinstance(inner[0], JoinedObservations):
        _cannot_export(f"before the memory, the {role} may have JoinedObservations only, not {_kinds(inner)}")
    norm = inner[0].norm
    if norm is None:
        return {}
    if (norm.clip, norm.eps, norm.std_eps) != (torch.inf, 0.0, _NORM_EPS):
        _cannot_export(
            f"the {role}'s ObservationNorm must have clip=inf, eps=0 and std_eps={_NORM_EPS}, as rsl_rl's, not "
            f"clip={norm.clip}, eps={norm.eps} and std_eps={norm.std_eps}"
        )
    moments = norm.moments
    mean, var = moments.mean.unsqueeze(0), moments.var.unsqueeze(0)
    return dict(zip(_MOMENTS, (mean, var, var.sqrt(), moments.count), strict=True))


def _kinds(modules: Sequence[object]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _cannot_export(reason: str) -> NoReturn:
    raise UnsupportedError(f"rsl_rl has no such network: {reason}.")
