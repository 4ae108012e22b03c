"""One TensorDict module as a call on tensors: what is left of it where no TensorDict is needed.

What TensorDict modules do around the arithmetic of a small network costs more than the arithmetic. A link calls what
is inside a module on :class:`~recurl.entries.Entries`: the same operations on the same shapes, hence the same bits. It
holds the module itself, no copy of its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor

from recurl.entries import Entries, unmarked
from recurl.errors import UsageError
from recurl.keys import NestedKey, normalize_key

__all__ = ["Link", "hooked", "link", "not_linkable"]

Link: TypeAlias = Callable[[Entries], Any]


def hooked(module: TensorDictModuleBase) -> str | None:
    """Say that ``module`` has hooks, which :func:`link` would not run, or return None."""
    if module._forward_hooks or module._forward_pre_hooks:  # pyright: ignore[reportPrivateUsage] - torch has no other
        return f"{type(module).__name__} has hooks"
    return None


def not_linkable(module: TensorDictModuleBase) -> str | None:
    """Say why ``module``, hooks apart, needs a TensorDict, or return None if :func:`link` serves."""
    name = type(module).__name__
    if not isinstance(module, TensorDictModule):
        return unmarked(module, "forward")
    if type(module).forward is not TensorDictModule.forward or "forward" in vars(module):
        return f"{name} has a forward of its own"
    special = module.method_kwargs or module._get_kwargs or module._kwargs is not None  # pyright: ignore[reportPrivateUsage] - likewise
    if special or module.method is not None or module.inplace is not True or module.out_keys != module.out_keys_source:
        return f"{name} has inplace, method, selected out_keys or a dict of in_keys"
    return None


def link(module: TensorDictModuleBase) -> Link:
    """Return a function of ``Entries`` that writes what ``module``, which is linkable, writes into a TensorDict.

    Example:
        >>> import torch
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> step = Entries({"observation": torch.zeros(4, 3)}, torch.Size([4]))
        >>> link(net)(step); step["logits"].shape
        torch.Size([4, 2])
    """
    if not isinstance(module, TensorDictModule):
        return cast(Link, module.forward)
    reads = [normalize_key(key) for key in module.in_keys]
    writes = [normalize_key(key) for key in module.out_keys]

    def run(entries: Entries) -> None:
        inputs = [entries.get(key) for key in reads]
        if any(value is None for value in inputs):
            _run_on_tensordict(module, entries, writes)  # which explains what is missing, or can do without
            return
        outputs = module.module(*inputs)
        if type(outputs) is Tensor and len(writes) == 1:
            entries.set(writes[0], outputs)
            return
        for key, value in zip(writes, _outputs(outputs, writes), strict=True):
            _write(entries, key, value)

    return run


def _run_on_tensordict(module: TensorDictModule, entries: Entries, writes: list[NestedKey]) -> None:
    result = module(entries.to_tensordict())
    for key in writes:
        _write(entries, key, result.get(key, None))


def _write(entries: Entries, key: NestedKey, value: Any) -> None:
    if key != "_":
        entries.set(key, value if isinstance(value, Tensor) else Entries.of(TensorDict.from_any(value)))


def _outputs(outputs: Any, keys: list[NestedKey]) -> tuple[Any, ...]:
    """What a network gave, one value for each of the out keys."""
    if isinstance(outputs, dict | TensorDictBase) and all(key in outputs for key in keys):
        return tuple(outputs[key] for key in keys)
    values = outputs if isinstance(outputs, tuple) else () if outputs is None else (outputs,)
    if len(values) != len(keys):
        raise UsageError(
            f"A module must give one tensor for each of its out_keys {keys}, got {len(values)}. A network that gives "
            "location and scale of a distribution ends with a NormalParamExtractor."
        )
    return values
