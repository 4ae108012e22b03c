"""Import paths of earlier versions, which remain valid.

Importing a former path such as ``recurl.errors`` returns the module of the current one, ``recurl.core.errors``; it is
the same object under two names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "MovedModules"]

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


class MovedModules(MetaPathFinder, Loader):
    """Finder and loader of the modules in :data:`MOVED`.

    Example:
        >>> import recurl.errors
        >>> recurl.errors is recurl.core.errors
        True
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a former path, None for any other."""
        return ModuleSpec(fullname, self) if _current(fullname) else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system create a placeholder, which :meth:`exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the current module in ``sys.modules`` under the former path."""
        name = _current(module.__name__)
        assert name is not None
        sys.modules[module.__name__] = import_module(name)


def _current(name: str) -> str | None:
    """Return the current path of a module with a former path, None for other modules."""
    parent = name
    while parent.startswith("recurl."):
        if parent in MOVED:
            return MOVED[parent] + name[len(parent) :]
        parent = parent.rpartition(".")[0]
    return None
