"""Step functions of policies on tensors: the networks of a run, or an exported function."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModuleBase
from torch import Tensor

from recurl.core.errors import UnsupportedError
from recurl.core.keys import ACTION, IS_INIT, NestedKey, next_key, normalize_key
from recurl.envs import EnvBase
from recurl.execution.compiled import CompiledFunction, function_of
from recurl.execution.lowering import Network, inputs_from, modules_leading_to
from recurl.modules import recurrent_modules
from recurl.sequences.entries import Entries
from recurl.sequences.mode import ExplorationType, set_exploration_type, set_recurrent_mode
from recurl.trainers.export.verification import Function
from recurl.trainers.networks.agent import Agent

Tensors: TypeAlias = dict[NestedKey, Tensor]


class Entry(NamedTuple):
    """Shape and dtype of an entry that a policy reads, for one environment."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PolicyStep(Protocol):
    """Protocol for one step of a policy.

    Attributes:
        reads: the input entries by key.
        states: keys of the hidden states among them.
    """

    reads: dict[NestedKey, Entry]
    states: list[NestedKey]

    def __call__(self, entries: Tensors, rows: int, *, deterministic: bool) -> tuple[Any, Tensors]:
        """Return actions and new hidden states, ``[n, ...]``, for entries ``[n, ...]``."""
        ...

    def compiled(self) -> tuple[list[NestedKey], CompiledFunction]:
        """Return the input keys and a compiled function from them to the greedy action and the new states.

        Raises:
            UnsupportedError: the step can't be compiled to one call of the C++ library.
        """
        ...


class AgentStep:
    """Step function of a run's networks; non-deterministic steps sample as in collection.

    Args:
        agent: the networks, on the CPU. They must not be modified later.
        env: environments of the run, with the policy's hidden states.
    """

    def __init__(self, agent: Agent, env: EnvBase) -> None:
        policies: dict[bool, TensorDictModuleBase] = {True: agent.actor, False: agent.policy}
        self.states: list[NestedKey] = [key for part in recurrent_modules(agent.actor) for key in part.state_keys]
        modules = {kind: _acting_modules(policy, self.states) for kind, policy in policies.items()}
        self._networks = {kind: _network(parts, deterministic=kind) for kind, parts in modules.items()}
        keys = dict.fromkeys(normalize_key(key) for kind in policies for key in _inputs(modules[kind]))
        specs = env.observation_spec
        lead = len(env.batch_size)
        self.reads = {key: Entry(tuple(specs[key].shape[lead:]), specs[key].dtype) for key in keys}

    def __call__(self, entries: Tensors, rows: int, *, deterministic: bool) -> tuple[Any, Tensors]:
        """Return the action and the new states."""
        network = self._networks[deterministic]
        with set_exploration_type(_exploration_type(deterministic)), set_recurrent_mode(False), torch.inference_mode():
            step = network(inputs_from(entries, torch.Size([rows]), None, [network]))
        action = step.get(ACTION)
        if isinstance(action, Entries):  # one entry per part
            action = action.to_tensordict()
        return action, {key: step.get(next_key(key)) for key in self.states}

    def compiled(self) -> tuple[list[NestedKey], CompiledFunction]:
        """Return the input keys and the compiled function."""
        network, one = self._networks[True], torch.Size([1])
        keys = _inputs(cast(Any, network.modules))
        example = Entries({}, one)
        for key in keys:
            example.set(key, torch.zeros(1, *self.reads[key].shape, dtype=self.reads[key].dtype))
        with set_exploration_type(_exploration_type(True)):
            return keys, function_of(network, example, keys, [ACTION, *map(next_key, self.states)])


def _acting_modules(policy: TensorDictModuleBase, states: list[NestedKey]) -> list[TensorDictModuleBase]:
    """Return the modules of a policy on which its actions and states depend."""
    written = [normalize_key(key) for key in policy.out_keys]
    actions = [key for key in written if key == ACTION or key[0] == ACTION]
    modules = modules_leading_to(policy, [*actions, *map(next_key, states)])
    return [_without_log_prob(module) for module in modules]


def _without_log_prob(module: TensorDictModuleBase) -> TensorDictModuleBase:
    """Return a sampler without its unused log-probability output; other modules unchanged."""
    if isinstance(module, ProbabilisticTensorDictModule) and module.return_log_prob:
        module = copy.copy(module)
        module.return_log_prob = False
    return module


def _exploration_type(deterministic: bool) -> ExplorationType:
    return ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM


def _network(modules: list[TensorDictModuleBase], *, deterministic: bool) -> Network:
    with set_exploration_type(_exploration_type(deterministic)):  # samplers are lowered for the current type
        return Network(modules)


def _inputs(modules: list[TensorDictModuleBase]) -> list[NestedKey]:
    """Return the keys that the modules read before any of them writes them."""
    read: dict[NestedKey, None] = {}
    written: set[NestedKey] = set()
    for module in modules:
        read |= dict.fromkeys(key for key in map(normalize_key, module.in_keys) if key not in written)
        written |= set(map(normalize_key, module.out_keys))
    return list(read)


class FileStep:
    """Step function of an exported file; deterministic only.

    Args:
        function: maps the inputs listed in ``about`` to its outputs.
        about: the description stored next to the file.
        keys: entry keys by input name.
    """

    def __init__(self, function: Function, about: Mapping[str, Any], keys: Mapping[str, NestedKey]) -> None:
        self._function = function
        self._names = [part["name"] for part in about["inputs"]]
        self._keys = [keys.get(name, name) for name in self._names]
        self.reads = {
            key: Entry(tuple(part["shape"][1:]), getattr(torch, part["dtype"]))
            for key, part in zip(self._keys, about["inputs"], strict=True)
        }
        self.states: list[NestedKey] = list(about["states"])
        outputs = [part["name"] for part in about["outputs"]]
        self._after = [outputs.index(name) for name in about["states"].values()]
        self._parts = [tuple(name.split(".")[1:]) for name in outputs if name.split(".")[0] == ACTION]

    def __call__(self, entries: Tensors, rows: int, *, deterministic: bool) -> tuple[Any, Tensors]:
        """Return the action and the new states."""
        if not deterministic:
            raise UnsupportedError(
                "An exported file contains the greedy policy only: deterministic=False needs the run, recurl.load(RUN)."
            )
        found = self._function([entries[key].flatten() if key == IS_INIT else entries[key] for key in self._keys])
        return self._action(found), {key: found[at].detach() for key, at in zip(self.states, self._after, strict=True)}

    def compiled(self) -> tuple[list[NestedKey], CompiledFunction]:
        """Return the input keys and the compiled function."""
        if not isinstance(self._function, CompiledFunction) or self._parts != [()]:
            raise UnsupportedError(
                "Only a file of format compiled, with a single action, is one call of the C++ library: export the run "
                "with --format compiled."
            )
        return self._keys, self._function

    def _action(self, found: Sequence[Tensor]) -> Any:
        """Return the action from the leading outputs: a tensor, or a TensorDict of its parts."""
        if self._parts == [()]:
            return found[0].detach()
        return TensorDict(
            {part: value.detach() for part, value in zip(self._parts, found, strict=False)}, [len(found[0])]
        )
