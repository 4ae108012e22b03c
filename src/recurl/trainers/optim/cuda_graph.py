"""CUDA graph of a training step: forward, loss, backward and optimiser, launched by one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn

from recurl.capture import KeptTensors, recording
from recurl.errors import ArgumentError, UsageError
from recurl.lowering import Entries, leaves
from recurl.quiet import quiet

Batch = TensorDictBase | Entries
_WARM_UP = 3
_Signature = dict[tuple[str, ...], tuple[torch.Size, torch.dtype, torch.device]]


class CudaGraphStep:
    """Runs a training step as a CUDA graph: one launch for all kernels, without Python in between.

    Every call makes exactly one step, the first three (of which the last is recorded) without the graph. A replay
    repeats the recorded kernels on the same memory: batches are copied into it, and parameters, buffers and the
    optimiser's state must only be changed in place. Python is not run again: a number that changes, such as a step
    size, must be a tensor on the GPU that is filled anew.

    The step must not wait for the GPU: no ``.item()`` or ``.cpu()``, no shapes that depend on data, no new tensors from
    Python numbers. Of the recurrent backends ``"triton"`` keeps to that. It must clear gradients by setting them to
    None, as ``optimizer.zero_grad()`` does.

    The recording itself is that of ``tensordict.nn.CudaGraphModule``.

    Args:
        step: from a batch (a TensorDict, or ``Entries``), and any tensors beside it, to a tensor, or several, without
            gradients: it computes the loss, its gradients, and steps the optimiser.
        module: what is trained.
        optimizer: what it steps, made with ``capturable=True``; one or several.

    Raises:
        UsageError: ``module`` is not on a CUDA device. When called: a submodule, parameter, buffer, step size or the
            optimiser's state was replaced since the first call (see :meth:`reset`), or the step can't be captured.
        ArgumentError: the optimiser is not capturable. When called: entries of the batch, their shapes, dtypes or
            devices differ from those of the first call.

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
        recurl.errors.UsageError: A CUDA graph needs all parameters on a CUDA device, got some on cpu: ...
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
                    "A CUDA graph needs an optimiser that keeps all its numbers on the GPU, got a "
                    f"{type(stepped).__name__} without capturable=True: make it with that, its lr a tensor if it "
                    "changes."
                )
        self._step = step
        self._module = module
        self.reset()

    def reset(self) -> None:
        """Forget the graph: the next calls record it anew, with the current parameters and batch."""
        self._signature: _Signature = {}
        self._kept: KeptTensors | None = None
        self._steered: list[Any] = []
        self._graph: CudaGraphModule | None = None
        self._calls = 0

    def __call__(self, batch: Batch, *tensors: Tensor) -> Any:
        """Make one step on ``batch`` and return what the step returns, in tensors that no later call changes."""
        entries = {**dict(leaves(batch)), **{(f"tensor {index}",): tensor for index, tensor in enumerate(tensors)}}
        signature = {key: (value.shape, value.dtype, value.device) for key, value in entries.items()}
        if self._graph is None:
            self._graph = self._begin(batch, signature, len(tensors))
        if signature != self._signature:
            raise ArgumentError(_difference(self._signature, signature))
        self._check_unchanged()
        try:
            with self._recording(), quiet("tensordict", logging.WARNING):  # it logs that it makes and records a graph
                return self._graph(*(entries[key] for key in self._signature))
        except RuntimeError as error:
            if "captur" in str(error):
                raise UsageError(
                    "The step can't be captured as a CUDA graph: it must not wait for the GPU (.item(), .cpu(), shapes "
                    "that depend on data, the recurrent backends loop and pad) nor make tensors from Python numbers. "
                    f"CUDA says: {str(error).splitlines()[0]}"
                ) from error
            raise

    def _recording(self) -> AbstractContextManager[None]:
        self._calls += 1
        return recording() if self._calls == _WARM_UP else nullcontext()

    def _begin(self, batch: Batch, signature: _Signature, beside: int) -> CudaGraphModule:
        self._signature = signature
        self._kept = KeptTensors(self._module)
        self._steered = self._steering()
        kind, size, device = type(batch), batch.batch_size, batch.device
        count = len(signature) - beside

        def run(*tensors: Tensor) -> Any:
            rebuilt: Batch = Entries({}, size, device)
            if not issubclass(kind, Entries):
                rebuilt = TensorDict({}, size, device=device)
            for key, value in zip(signature, tensors[:count], strict=False):
                rebuilt.set(key, value)
            return self._step(rebuilt, *tensors[count:])

        with quiet("tensordict", logging.WARNING):  # it logs that it makes and records a graph
            return CudaGraphModule(run, warmup=_WARM_UP)

    def _steering(self) -> list[Any]:
        rates = [group["lr"] for stepped in self._optimizers for group in stepped.param_groups]
        return [*(stepped.state for stepped in self._optimizers), *rates]

    def _check_unchanged(self) -> None:
        replaced = None if self._kept is None else self._kept.replaced()
        if replaced is not None:
            raise UsageError(
                f"{replaced} was replaced since the first step, but a CUDA graph goes on with the old one: change it "
                "in place, or call reset() to record the graph anew."
            )
        for now, then in zip(self._steering(), self._steered, strict=True):
            if now is not then:
                raise UsageError(
                    "The optimiser's state or step size was replaced since the first step, but a CUDA graph goes on "
                    "with the old one: give the lr as a tensor and fill it, or call reset() to record the graph anew."
                )


def check_devices(module: nn.Module) -> None:
    """Refuse a module that is not on a CUDA device.

    Raises:
        UsageError: it isn't.
    """
    devices = {str(parameter.device) for parameter in module.parameters() if parameter.device.type != "cuda"}
    if devices:
        raise UsageError(
            f"A CUDA graph needs all parameters on a CUDA device, got some on {', '.join(sorted(devices))}: move the "
            "module there, module.to('cuda'), or run the step without a graph."
        )


def _difference(expected: _Signature, got: _Signature) -> str:
    both = [key for key in expected if key in got and expected[key] != got[key]]
    parts = [f"{_name(key)} was {_say(expected[key])}, now {_say(got[key])}" for key in both]
    parts += [f"{_name(key)} is missing" for key in expected if key not in got]
    parts += [f"{_name(key)} is new" for key in got if key not in expected]
    return (
        "A CUDA graph needs a batch like the first one at every step (entries, shapes, dtypes, devices): "
        f"{'; '.join(parts)}. Use batches of equal size, or call reset() to record the graph anew."
    )


def _name(key: tuple[str, ...]) -> str:
    return repr(key[0] if len(key) == 1 else key)


def _say(entry: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    return f"{list(entry[0])} {str(entry[1]).removeprefix('torch.')} on {entry[2]}"
