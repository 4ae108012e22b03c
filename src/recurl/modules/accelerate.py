"""Models of other libraries on recurl's backends."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.core.torch_compat import children_of, has_hooks
from recurl.nn.rewriting import is_rewritten, rewritten
from recurl.nn.swapped import is_swapped, swap_layer

__all__ = ["Accelerated", "accelerate"]


@dataclass(frozen=True)
class Accelerated:
    """What :func:`accelerate` changed.

    Attributes:
        swapped: what runs on recurl's backends now, by its place in the model.
        kept: what stays as it was, with the reason.
    """

    swapped: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a line for each place."""
        lines = [f"{place}: {what}" for place, what in self.swapped.items()]
        return "\n".join([*lines, *(f"{place} stays as it was: {why}" for place, why in self.kept.items())])


def accelerate(model: nn.Module) -> Accelerated:
    """Let the LSTMs and GRUs of a model run on recurl's backends, in place.

    * Every ``torch.nn.LSTM`` and ``GRU`` keeps its Parameters, hooks and state dict, so an optimizer goes on. Results
      are the same up to rounding; random masks of dropout differ, and under autocast they are of the parameters' dtype.
      Derivatives of second order and forward mode need ``layer.recurrent_backend = "loop"``. Packed sequences,
      ``torch.export``, ``torch.jit.trace`` and ``torch.jit.script`` run torch's own operations. What finds layers by
      their very class, as ``torch.ao.quantization.quantize_dynamic`` does, leaves swapped ones as they are; set
      ``layer.__class__ = torch.nn.LSTM`` before to get the original.
    * Passes over sequences become one call, in the class of the module; other objects of it run as before, and so does
      a layer with hooks. They are loops that multiply the states by ``1 - done`` at each step, as in CleanRL's agents
      and in the policies of SB3-Contrib's ``RecurrentPPO``, where flags are 0 or 1; loops over the parts of sequences
      between the ends of episodes, as in the models of skrl's documentation; and the padded trajectories of rsl_rl's
      recurrent models, which aren't padded then.
    * TorchRL's ``LSTMModule`` and ``GRUModule`` inside a container are replaced by recurl's, with the same Parameters
      and keys. In recurrent mode these write the next states of every step, where TorchRL writes those at the ends of
      sequences and zeros elsewhere, and also start a sequence where ``("collector", "traj_ids")`` changes. Losses that
      run the network on the batch and then on its ``"next"``, as ``DQNLoss``, so begin the latter with the state after
      the first step instead of zeros: their values differ. Bidirectional ones stay; their layers are swapped.

    Args:
        model: an agent, a policy (``model.policy`` of SB3-Contrib), an actor and critic in a ``ModuleList``.

    Returns:
        What was swapped, and what was not and why.

    Raises:
        ArgumentTypeError: ``model`` isn't a ``torch.nn.Module``.
        ArgumentError: nothing in it can be swapped; the message states why.

    Example:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"memory": nn.LSTM(4, 8), "head": nn.Linear(8, 2)})
        >>> print(accelerate(model))
        memory: torch.nn.LSTM
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - users
        attributes = getattr(model, "__dict__", {})
        inside = next((name for name, value in attributes.items() if isinstance(value, nn.Module)), None)
        advice = "" if inside is None else f" Pass its module, such as .{inside}."
        raise ArgumentTypeError(f"accelerate needs a torch.nn.Module, got {type(model).__name__}.{advice}")
    result = Accelerated()
    _swap_torchrl(model, result)
    for place, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            name = f"torch.nn.{type(module).__name__}"
            if is_swapped(module):
                result.swapped[place or "the model"] = "swapped before"
                continue
            why = swap_layer(module)
            (result.swapped if why is None else result.kept)[place or "the model"] = why or name
        elif (why := _other_layer(module)) is not None:
            result.kept[place or "the model"] = why
    _report_unregistered(model, result)
    if not result.swapped:
        raise ArgumentError(f"Nothing to accelerate: {str(result) or 'the model has no torch.nn.LSTM or GRU'}.")
    for place, module in model.named_modules():
        _swap_passes(place, module, result)
    return result


def _other_layer(module: nn.Module) -> str | None:
    """Return why a relative of torch.nn's layers isn't swapped; None for other modules."""
    kind = type(module)
    if isinstance(module, nn.RNNCellBase):
        return f"{kind.__name__} takes single steps: run torch.nn's layer over the sequence for the kernels"
    if isinstance(module, torch.jit.ScriptModule):
        scripted = getattr(module, "original_name", "") in ("LSTM", "GRU")
        return "it is compiled by torch.jit: accelerate the model before" if scripted else None
    if kind.__module__.startswith("torch.ao.") and kind.__name__ in ("LSTM", "GRU"):
        return "its weights are quantized, which recurl's backends don't read"
    return None


def _report_unregistered(model: nn.Module, result: Accelerated) -> None:
    """Report modules with recurrent layers in plain lists and dicts, which torch doesn't find in the model."""
    found, own = set(model.modules()), vars(nn.Module()).keys()
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            if name in own or not isinstance(value, list | tuple | dict):
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            spot, kind = f"{place}.{name}" if place else name, type(value).__name__
            proper = "ModuleDict" if isinstance(value, dict) else "ModuleList"
            for key, item in items:
                hidden = isinstance(item, nn.Module) and item not in found
                if hidden and any(isinstance(one, nn.RNNBase) for one in item.modules()):
                    result.kept[f"{spot}[{key!r}]"] = f"a {kind} hides it from torch: use a torch.nn.{proper}"


def _swap_passes(place: str, module: nn.Module, result: Accelerated) -> None:
    """Replace passes over sequences in the methods of a module's class; others of the class run them as before."""
    layers = [f"self.{name}" for name, one in module.named_modules() if name and is_swapped(one)]
    for owner in type(module).__mro__:
        if owner.__module__.partition(".")[0] in ("torch", "recurl", "builtins"):
            continue
        for name, attribute in list(vars(owner).items()):
            function: Any = getattr(attribute, "__func__", attribute)
            if not inspect.isfunction(function):
                continue
            spot = f"{place}.{name}" if place else name
            if is_rewritten(function):
                result.swapped[spot] = "swapped before"
                continue
            made, what = rewritten(function, layers)
            if made is not None:
                bound = type(attribute) if isinstance(attribute, staticmethod | classmethod) else None
                setattr(owner, name, made if bound is None else bound(made))
            if what is not None:
                (result.kept if made is None else result.swapped)[spot] = what


def _swap_torchrl(model: nn.Module, result: Accelerated) -> None:
    """Replace TorchRL's recurrent modules in containers by recurl's, with the same Parameters."""
    if _is_module_of("torchrl", model):
        result.kept["the model"] = "TorchRL's module itself can't be replaced in place: put it into a container"
    made: dict[int, nn.Module | str] = {}
    for place, parent in list(model.named_modules()):
        for name, child in list(children_of(parent).items()):
            spot = f"{place}.{name}" if place else name
            if child is not None and _is_module_of("recurl", child):
                result.swapped[spot] = "swapped before"
            elif child is not None and _is_module_of("torchrl", child):
                if id(child) not in made:
                    made[id(child)] = _of_torchrls(child)
                ours = made[id(child)]
                if isinstance(ours, str):
                    result.kept[spot] = ours
                else:
                    setattr(parent, name, ours)
                    result.swapped[spot] = f"TorchRL's {type(child).__name__}"


def _is_module_of(library: str, module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith(f"{library}.") and kind.__name__ in ("LSTMModule", "GRUModule")


def _of_torchrls(module: Any) -> nn.Module | str:
    """Return recurl's module with the Parameters and keys of TorchRL's, or why there is none."""
    # Other libraries don't need tensordict.
    from recurl.modules.interop import for_torchrl  # noqa: PLC0415
    from recurl.modules.lstm_gru import GRUModule, LSTMModule  # noqa: PLC0415
    from recurl.sequences.mode import recurrent_mode  # noqa: PLC0415

    lstm = type(module).__name__ == "LSTMModule"
    layer = module.lstm if lstm else module.gru
    if type(layer) not in (nn.LSTM, nn.GRU):
        return "it is python_based: call make_cudnn_based() first"
    if layer.bidirectional:
        return "it is bidirectional, and recurl's module runs such a layer over sequences only, not in single steps"
    if any(map(has_hooks, module.modules())) or [*module.buffers()] or layer.training != module.training:
        return "it has hooks, buffers, or a layer in another mode (train, eval), which a replacement would lose"
    if any(name not in layer.state_dict() for name in (f"weight_hh_l{k}" for k in range(layer.num_layers))):
        return "its layer is parametrized"
    if recurrent_mode() is not None:
        return "a recurrent mode is set, so its own isn't known: call accelerate outside of set_recurrent_mode"
    settings: dict[str, Any] = {
        "in_keys": list(module.in_keys),
        "out_keys": list(module.out_keys),
        "recurrent_backend": "fastest",
        "default_recurrent_mode": module.recurrent_mode,
    }
    made = LSTMModule(lstm=layer, **settings) if lstm else GRUModule(gru=layer, **settings)
    return for_torchrl(made).train(module.training)
