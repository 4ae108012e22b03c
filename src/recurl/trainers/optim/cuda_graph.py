"""CUDA graph of a training step: forward, loss, backward and optimizer in a single launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from recurl.core.errors import ArgumentError, UsageError
from recurl.execution.capture import GraphedFunction, ModuleGuard
from recurl.sequences.entries import Entries, leaves

Batch = TensorDictBase | Entries
_Signature = dict[tuple[str, ...], tuple[torch.Size, torch.dtype, torch.device]]


class CudaGraphStep:
    """Training step as a CUDA graph (see :class:`~recurl.execution.capture.GraphedFunction`).

    Every call makes exactly one step. The third call captures the step, and it and later calls replay the graph on the
    same memory: batches are copied into it, and parameters, buffers and the optimizer's state may only be changed in
    place. Python code is not run again: a number that changes, such as the learning rate, must be a GPU tensor that is
    filled in place.

    The step must not wait for the GPU: no ``.item()`` or ``.cpu()``, no shapes that depend on data, no new tensors from
    Python numbers. Among the recurrent backends, ``"triton"`` satisfies this. The step must clear gradients by setting
    them to None, as ``optimizer.zero_grad()`` does.

    Args:
        step: function from a batch (a TensorDict or ``Entries``), and optional further tensors, to one or more tensors
            without gradients, which may be in tuples, lists or dicts. It computes the loss and its gradients, and steps
            the optimizer. It gets copies of the batch and tensors.
        module: the module to train.
        optimizer: its optimizer or optimizers, created with ``capturable=True``.

    Raises:
        UsageError: if ``module`` is not on a CUDA device. When called: if a submodule, parameter, buffer, learning rate
            or the optimizer's state has been replaced since the first call (see :meth:`reset`), or the step can't be
            captured.
        ArgumentError: if an optimizer is not capturable. When called: if the entries of the batch, or their shapes,
            dtypes or devices, differ from those of the first call; or if one requires gradients or is on another device
            than the parameters.

    Example:
        >>> from tensordict import TensorDict
        >>> from torch import Tensor, nn
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
        self._device: torch.device = self._optimizers[0].param_groups[0]["params"][0].device
        self.reset()

    def reset(self) -> None:
        """Discard the graph: the next calls capture it again, with the current parameters and batch."""
        self._signature: _Signature = {}
        self._guard: ModuleGuard | None = None
        self._graphed: GraphedFunction[Any] | None = None

    def __call__(self, batch: Batch, *tensors: Tensor) -> Any:
        """Make one step on ``batch`` and return its results, in tensors that later calls don't change."""
        entries = {**dict(leaves(batch)), **{(f"tensor {index}",): tensor for index, tensor in enumerate(tensors)}}
        signature = {key: (value.shape, value.dtype, value.device) for key, value in entries.items()}
        graphed = self._graphed
        if graphed is None:
            graphed = self._graphed = self._begin(batch, signature, len(tensors))
        if signature != self._signature:
            raise ArgumentError(_describe_difference(self._signature, signature))
        self._check_unchanged()
        values = [entries[key] for key in self._signature]
        if any(value.requires_grad for value in values):
            needing = [_name(key) for key in self._signature if entries[key].requires_grad]
            raise ArgumentError(
                f"The batch of a captured step must not require gradients, but {', '.join(needing)} does: detach it. "
                "Tensors that are trained belong to the module."
            )
        return _clone(graphed(*values))

    def _begin(self, batch: Batch, signature: _Signature, extra: int) -> GraphedFunction[Any]:
        other = [key for key, (_, _, device) in signature.items() if device != self._device]
        if other:
            raise ArgumentError(
                f"The batch of a captured step must be on {self._device}, like the parameters, but {_name(other[0])} "
                f"is on {signature[other[0]][-1]}: move it there with batch.to({str(self._device)!r})."
            )
        self._signature = signature
        self._guard = ModuleGuard(self._module, settings=self._optimizer_state)
        kind, size, device = type(batch), batch.batch_size, batch.device
        count = len(signature) - extra

        def run(*tensors: Tensor) -> Any:
            rebuilt: Batch = Entries({}, size, device)
            if not issubclass(kind, Entries):
                rebuilt = TensorDict({}, size, device=device)
            for key, value in zip(signature, tensors[:count], strict=False):
                rebuilt.set(key, value)
            return self._step(rebuilt, *tensors[count:])

        return GraphedFunction(run, self._device, name="step", instead="use a backend other than loop and pad")

    def _optimizer_state(self) -> dict[str, object]:
        """Return what the graph reads of the optimizers, by its name in an error message."""
        found: dict[str, object] = {}
        for number, stepped in enumerate(self._optimizers):
            found[f"The state of optimizer {number}"] = stepped.state
            for index, group in enumerate(stepped.param_groups):
                found[f"The learning rate of optimizer {number}, group {index}, which must be a tensor,"] = group["lr"]
                for name in stepped.defaults.keys() - {"lr"}:
                    value = group[name]
                    for place, part in enumerate(value if isinstance(value, tuple) else [value]):
                        found[f"{name} of optimizer {number}, group {index}, number {place},"] = part
        return found

    def _check_unchanged(self) -> None:
        replaced = None if self._guard is None else self._guard.replaced()
        if replaced is not None:
            raise UsageError(
                f"{replaced} was replaced, frozen or unfrozen after the first step, but the CUDA graph still uses it "
                "as it was: change it in place, or call reset() to capture the graph again."
            )


def _clone(results: Any) -> Any:
    """Copy tensors, or tuples, lists and dicts of them."""
    if isinstance(results, (Tensor, TensorDictBase, Entries)):
        return results.clone()
    if isinstance(results, dict):
        return {key: _clone(result) for key, result in results.items()}
    if isinstance(results, (tuple, list)):
        copies = [_clone(result) for result in results]
        return type(results)(*copies) if hasattr(results, "_fields") else type(results)(copies)
    return results


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
