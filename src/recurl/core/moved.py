"""Import paths of earlier versions, which remain valid, and paths of TorchRL's modules.

Importing a former path such as ``recurl.errors`` returns the module of the current one, ``recurl.core.errors``; it is
the same object under two names. In the same way, a path of TorchRL such as ``recurl.objectives.utils`` returns the
package, ``recurl.objectives``, which has its names or says what to write instead.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["ABSENT_MODULES", "MOVED", "TORCHRL", "MovedModules"]

_CORE = "archive autograd errors importing keys precision ranges seeding spans specs untrusted versions"
_SEQUENCES = "continuity mode start_states"
_NATIVE = "library memory passes program"
_EXECUTION = "capture columns compiled lowering readback small_products source_lines traced"
MOVED = {
    **{f"recurl.{name}": f"recurl.core.{name}" for name in _CORE.split()},
    **{f"recurl.{name}": f"recurl.sequences.{name}" for name in _SEQUENCES.split()},
    **{f"recurl.recurrence.cpu.{name}": f"recurl.native.{name}" for name in _NATIVE.split()},
    **{f"recurl.{name}": f"recurl.execution.{name}" for name in _EXECUTION.split()},
    "recurl.data.replay_buffers.device.draws": "recurl.data.replay_buffers.draws",
    "recurl.data.replay_buffers.device.learning": "recurl.data.replay_buffers.recurrent",
    "recurl.data.replay_buffers.marks": "recurl.sequences.sample_marks",
    "recurl.devices": "recurl.core.devices",
    "recurl.diagnostics.gpu_time": "recurl.execution.gpu_time",
    "recurl.envs.trajectories": "recurl.sequences.trajectories",
    "recurl.hardware": "recurl.core.devices",
    "recurl.interop": "recurl.modules.interop",
    "recurl.lowering.entries": "recurl.sequences.entries",
    "recurl.modules.compiled_sampler": "recurl.modules.cpp_forms",
    "recurl.modules.linear_cells": "recurl.modules.blocks",
    "recurl.modules.python_rnn": "recurl.nn.rnn",
    "recurl.modules.recurrent_net": "recurl.nn.recurrent_net",
    "recurl.objectives.value.functional": "recurl.sequences.returns",
    "recurl.recurrence.boundaries": "recurl.sequences.index",
    "recurl.recurrence.cpu.adam": "recurl.trainers.optim.cpp_adam",
    "recurl.recurrence.linear.derivatives": "recurl.recurrence.linear.kernels",
    "recurl.recurrence.linear.ops": "recurl.recurrence.operation",
    "recurl.recurrence.linear.registry": "recurl.recurrence.built_in",
    "recurl.recurrence.linear.reverse": "recurl.sequences.reverse",
    "recurl.recurrence.ops": "recurl.recurrence.operation",
    "recurl.recurrence.triton": "recurl.recurrence.cuda",
    "recurl.recurrence.triton.adam": "recurl.trainers.optim.triton_adam",
    "recurl.recurrence.triton.adam_kernels": "recurl.trainers.optim.triton_adam_kernels",
    "recurl.sequences.boundaries": "recurl.sequences.index",
    "recurl.trainers.optim.programs": "recurl.execution.inductor",
    "recurl.trainers.study.popgym": "recurl.experiments.popgym",
}
"""Former to current paths; the modules of a package move with it."""

_TORCHRL = {
    "collectors": "collectors distributed utils weight_update",
    "data": "map postprocs tensor_specs utils video",
    "data.replay_buffers": "checkpointers her offline_to_online query ray_buffer replay_buffers sample_units scheduler "
    "utils writers",
    "envs": "async_envs batched_envs common custom gym_like model_based vec_envs",
    "envs.libs": "brax craftground dm_control envpool genesis habitat isaac_lab isaacgym jax_utils jumanji lbforaging "
    "libero meltingpot mjlab mujoco_playground openml openspiel procgen robohive safety_gymnasium smacv2 "
    "unity_mlagents utils",
    "envs.transforms": "functional gym_transforms mean_action_selector module r3m ray_service rb_transforms rnd "
    "transforms utils vc1 vecnorm vip",
    "modules": "functional mcts models planners tensordict_module value_norm value_transforms",
    "modules.distributions": "continuous discrete truncated_normal utils",
    "objectives": "act bc cql crossq ddpg decision_transformer deprecated diffusion_bc dreamer dreamer_v3 functional "
    "gail iql multiagent pilco redq rnd td3_bc tqc utils world_model_loss",
    "objectives.value": "utils",
    "trainers": "helpers trainers",
}
TORCHRL = {
    f"recurl.{package}.{name}": "recurl.envs" if package == "envs.libs" else f"recurl.{package}"
    for package, names in _TORCHRL.items()
    for name in names.split()
}
"""TorchRL's modules, and those inside them, to the package that has their names."""
_ABSENT = (
    "_utils checkpoint collectors.llm data.datasets data.llm data.vla envs.llm modules.inference_server modules.llm "
    "modules.vla objectives.llm record render services testing weight_update"
)
ABSENT_MODULES = {f"recurl.{name}" for name in _ABSENT.split()}
"""TorchRL's modules without counterpart: :data:`~recurl.core.torchrl_names.INSTEAD` says what to write."""


class MovedModules(MetaPathFinder, Loader):
    """Finder and loader of the modules in :data:`MOVED`, :data:`TORCHRL` and :data:`ABSENT_MODULES`.

    Example:
        >>> import recurl.errors
        >>> recurl.errors is recurl.core.errors
        True
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a former path or one of TorchRL, None for any other."""
        return ModuleSpec(fullname, self) if _current(fullname) or _within(ABSENT_MODULES, fullname) else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system create a placeholder, which :meth:`exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the current module in ``sys.modules`` under the former path.

        Raises:
            MissingNameError: it is a module of TorchRL that recurl doesn't have; the message says what to write.
        """
        name = _current(module.__name__)
        if name is None:
            absent = _within(ABSENT_MODULES, module.__name__)
            assert absent is not None
            advice = import_module("recurl.core.torchrl_names").INSTEAD[absent]
            raise import_module("recurl.core.errors").MissingNameError(f"recurl has no module {absent}: {advice}.")
        sys.modules[module.__name__] = import_module(name)


def _current(name: str) -> str | None:
    """Return the path of a module with a former path or one of TorchRL, None for other modules."""
    if (parent := _within(MOVED, name)) is not None:
        return MOVED[parent] + name[len(parent) :]
    parent = _within(TORCHRL, name)
    return None if parent is None else TORCHRL[parent]


def _within(paths: Container[str], name: str) -> str | None:
    """Return the path that is the module or a package that it is in, None if there is none."""
    while name.startswith("recurl."):
        if name in paths:
            return name
        name = name.rpartition(".")[0]
    return None
