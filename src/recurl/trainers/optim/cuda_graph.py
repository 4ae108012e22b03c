"""CUDA graph of a training step: forward, loss, backward and optimizer in a single launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn

from recurl.core.errors import ArgumentError, UsageError
from recurl.core.messages import quiet
from recurl.execution.capture import ModuleGuard, recording
from recurl.sequences.entries import Entries, leaves

Batch = TensorDictBase | Entries
_WARM_UP = 3
_Signature = dict[tuple[str, ...], tuple[torch.Size, torch.dtype, torch.device]]


class CudaGraphStep:
    """Training step captured as a CUDA graph: one launch for all kernels, without Python in between.

    Every call makes exactly one step. The first three calls run eagerly, and the third is captured. A replay runs the
    captured kernels on the same memory: batches are copied into it, and parameters, buffers and the optimizer's state
    may only be changed in place. Python code is not run again: a number that changes, such as the learning rate, must
    be a GPU tensor that is filled in place.

    The step must not wait for the GPU: no ``.item()`` or ``.cpu()``, no shapes that depend on data, no new tensors from
    Python numbers. Among the recurrent backends, ``"triton"`` satisfies this. The step must clear gradients by setting
    them to None, as ``optimizer.zero_grad()`` does.

    Capture uses ``tensordict.nn.CudaGraphModule``.

    Args:
        step: function from a batch (a TensorDict or ``Entries``), and optional further tensors, to one or more tensors
            without gradients. It computes the loss and its gradients, and steps the optimizer.
        module: the module to train.
        optimizer: its optimizer or optimizers, created with ``capturable=True``.

    Raises:
        UsageError: if ``module`` is not on a CUDA device. When called: if a submodule, parameter, buffer, learning rate
            or the optimizer's state has been replaced since the first call (see :meth:`reset`), or the step can't be
            captured.
        ArgumentError: if an optimizer is not capturable. When called: if the entries of the batch, or their shapes,
            dtypes or devices, differ from those of the first call.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(net.parameters(), capturable=True)
        >>> def step(batch: TensorDict) -> Tensor:
        ...     loss = net(batch["x"]).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> CudaGraphStep(step, net, optimizer)
        Traceback (most recent call last):
            ...
        recurl.core.errors.UsageError: A CUDA graph needs all parameters on a CUDA device, got some on cpu: ...
    """

    def __init__(
        self,
        step: Callable[..., Any],
        module: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    ) -> None:
        check_devices(module)
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        for stepped in self._optimizers:
            if not all(group.get("capturable", False) for group in stepped.param_groups):
                raise ArgumentError(
                    "A CUDA graph needs an optimizer that keeps all its numbers on the GPU, got a "
                    f"{type(stepped).__name__} without capturable=True: create it with that, and with a tensor as lr "
                    "if it changes."
                )
        self._step = step
        self._module = module
        self.reset()

    def reset(self) -> None:
        """Discard the graph: the next calls capture it again, with the current parameters and batch."""
        self._signature: _Signature = {}
        self._guard: ModuleGuard | None = None
        self._guarded_optimizer_state: list[Any] = []
        self._graph: CudaGraphModule | None = None
        self._calls = 0

    def __call__(self, batch: Batch, *tensors: Tensor) -> Any:
        """Make one step on ``batch`` and return its results, in tensors that later calls don't change."""
        entries = {**dict(leaves(batch)), **{(f"tensor {index}",): tensor for index, tensor in enumerate(tensors)}}
        signature = {key: (value.shape, value.dtype, value.device) for key, value in entries.items()}
        if self._graph is None:
            self._graph = self._create_graph(batch, signature, len(tensors))
        if signature != self._signature:
            raise ArgumentError(_describe_difference(self._signature, signature))
        self._check_unchanged()
        try:
            with self._recording(), quiet("tensordict", logging.WARNING):  # it logs the capture
                return self._graph(*(entries[key] for key in self._signature))
        except RuntimeError as error:
            if "captur" in str(error):
                raise UsageError(
                    "The step can't be captured as a CUDA graph: it must not wait for the GPU (.item(), .cpu(), shapes "
                    "that depend on data, the recurrent backends loop and pad) or create tensors from Python numbers. "
                    f"CUDA says: {str(error).splitlines()[0]}"
                ) from error
            raise

    def _recording(self) -> AbstractContextManager[None]:
        self._calls += 1
        return recording() if self._calls == _WARM_UP else nullcontext()

    def _create_graph(self, batch: Batch, signature: _Signature, extra: int) -> CudaGraphModule:
        self._signature = signature
        self._guard = ModuleGuard(self._module)
        self._guarded_optimizer_state = self._optimizer_state()
        kind, size, device = type(batch), batch.batch_size, batch.device
        count = len(signature) - extra

        def run(*tensors: Tensor) -> Any:
            rebuilt: Batch = Entries({}, size, device)
            if not issubclass(kind, Entries):
                rebuilt = TensorDict({}, size, device=device)
            for key, value in zip(signature, tensors[:count], strict=False):
                rebuilt.set(key, value)
            return self._step(rebuilt, *tensors[count:])

        with quiet("tensordict", logging.WARNING):  # it logs the capture
            return CudaGraphModule(run, warmup=_WARM_UP)

    def _optimizer_state(self) -> list[Any]:
        rates = [group["lr"] for stepped in self._optimizers for group in stepped.param_groups]
        return [*(stepped.state for stepped in self._optimizers), *rates]

    def _check_unchanged(self) -> None:
        replaced = None if self._guard is None else self._guard.replaced()
        if replaced is not None:
            raise UsageError(
                f"{replaced} was replaced after the first step, but the CUDA graph still uses the old one: change it "
                "in place, or call reset() to capture the graph again."
            )
        for now, then in zip(self._optimizer_state(), self._guarded_optimizer_state, strict=True):
            if now is not then:
                raise UsageError(
                    "The optimizer's state or learning rate was replaced after the first step, but the CUDA graph "
                    "still uses the old one: pass lr as a tensor and fill it in place, or call reset() to capture the "
                    "graph again."
                )


def check_devices(module: nn.Module) -> None:
    """Check that a module is on a CUDA device.

    Raises:
        UsageError: if a parameter isn't.
    """
    devices = {str(parameter.device) for parameter in module.parameters() if parameter.device.type != "cuda"}
    if devices:
        raise UsageError(
            f"A CUDA graph needs all parameters on a CUDA device, got some on {', '.join(sorted(devices))}: move the "
            "module there, module.to('cuda'), or run the step without a graph."
        )


def _describe_difference(expected: _Signature, got: _Signature) -> str:
    both = [key for key in expected if key in got and expected[key] != got[key]]
    parts = [f"{_name(key)} was {_describe(expected[key])}, now {_describe(got[key])}" for key in both]
    parts += [f"{_name(key)} is missing" for key in expected if key not in got]
    parts += [f"{_name(key)} is new" for key in got if key not in expected]
    return (
        "A CUDA graph needs a batch like the first one at every step (entries, shapes, dtypes, devices): "
        f"{'; '.join(parts)}. Use batches of equal size, or call reset() to capture the graph again."
    )


def _name(key: tuple[str, ...]) -> str:
    return repr(key[0] if len(key) == 1 else key)


def _describe(entry: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    return f"{list(entry[0])} {str(entry[1]).removeprefix('torch.')} on {entry[2]}"
