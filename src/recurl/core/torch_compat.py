"""Private names of torch used by recurl, each with its purpose and a fallback if it disappears.

A new release of torch can break only this file and its test. A missing name doesn't break ``import recurl``: its
fallback is used if it is as good, or an error is raised at the first use (see :mod:`recurl.core.private_names`).
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from recurl.core.errors import UnsupportedError
from recurl.core.private_names import Absent, absent_error, find, load, needs

__all__ = [
    "DROPOUTS",
    "EXPORT_LOGGER",
    "OPERATIONS",
    "CompletedState",
    "NotifiedModule",
    "are_modes_active",
    "are_transforms_excluded",
    "assert_async",
    "check",
    "children_of",
    "compile_packed",
    "compiler_cache",
    "compiler_environment",
    "compiling",
    "edits_of",
    "foreach_copy_",
    "foreach_lerp_",
    "has_global_hooks",
    "has_hooks",
    "has_step_hooks",
    "has_tensor_hooks",
    "hooks_of",
    "import_compiler",
    "inductor_program",
    "is_compiling",
    "is_exporting",
    "is_forward_mode",
    "is_functorch_active",
    "is_known",
    "lift_tensors",
    "limit_compile_threads",
    "pack_program",
    "parameters_of",
    "rnn_kernel",
    "running_by",
    "scan",
    "schema_of",
    "start_compilers",
    "tensors_of",
    "trace",
    "traced_graph",
]

F = TypeVar("F", bound=Callable[..., Any])


def _reads(*names: str) -> Callable[[F], F]:
    """Return a decorator for a function that reads private attributes of modules, which raises if one is missing."""
    held = vars(nn.Module())
    missing = [name for name in names if name not in held]

    def decorate(function: F) -> F:
        return cast(F, Absent(f"torch:nn.Module.{missing[0]}")) if missing else function

    return decorate


is_functorch_active: Callable[[], bool] = find("torch:_C._are_functorch_transforms_active")
"""Return whether ``vmap``, ``grad`` or ``functionalize`` wrap results in this context, even of unwrapped inputs.

Replacement: ``torch.func.debug_unwrap(result) is not result`` on a result of each operation.
"""

are_modes_active: Callable[[], int] = find("torch:_C._len_torch_dispatch_stack", lambda: 1)
"""Return the number of active ``TorchDispatchMode`` contexts, which don't see calls of recurl's C++ library.

Fallback: 1, so that steps always run with torch operations.
"""


_excluded: Callable[[Any], bool] = find("torch:_C._dispatch_tls_is_dispatch_key_excluded", lambda key: True)


def are_transforms_excluded() -> bool:
    """Return whether ``torch.func`` has no effect here: in an operation that a ``TorchDispatchMode`` runs.

    Fallback: True, so that derivatives are always taken in a thread of their own, which costs 0.1 ms.
    """
    with suppress(UnsupportedError):
        return _excluded(load("torch:_C.DispatchKey.FuncTorchDynamicLayerFrontMode"))
    return True


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


_foreach_copy_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = find("torch:_foreach_copy_", _copy_each)
"""Copy tensors into others in one call. Fallback: a loop of ``Tensor.copy_``, slower by microseconds per step."""


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others in one call; on a GPU in one call per dtype and contiguity, each a single kernel.

    Example:
        >>> x = torch.zeros(2)
        >>> foreach_copy_([x], [torch.ones(2)])
        >>> x
        tensor([1., 1.])
    """
    if not targets or not targets[0].is_cuda:
        _foreach_copy_(targets, sources)
        return
    for pairs in _of_one_kind(targets, sources):
        _foreach_copy_(*pairs)


def _of_one_kind(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    kinds: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        kind = target.dtype, source.dtype, target.is_contiguous() and source.is_contiguous()
        pair = kinds.setdefault(kind, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    return kinds.values()


foreach_lerp_: Callable[[Sequence[Tensor], Sequence[Tensor], float], None] = find("torch:_foreach_lerp_")
"""Interpolate tensors towards others in one call. Replacement: a loop of ``Tensor.lerp_``."""

assert_async: Callable[[Tensor, str], None] = find("torch:_assert_async", lambda condition, message: None)
"""Raise an error if a bool on the device is False, without waiting for the device. Fallback: no check on a GPU."""

edits_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return the number of in-place edits of a tensor, as counted by torch; raise RuntimeError for inference tensors.

Fallback: compare the contents.
"""

scan: Callable[..., Any] = find("torch._higher_order_ops.scan:scan")
"""Scan over a dimension, which ``torch.compile`` keeps as one loop. Replacement: ``torch.scan``, once torch has it."""

DROPOUTS: Any = find(
    "torch.nn.modules.dropout:_DropoutNd",
    (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)
"""Base class of all dropout modules, users' own included. Fallback: torch's own classes."""

check: Callable[[bool], None] = find("torch:_check")
"""Tell ``torch.compile`` that a condition holds; public, despite its name."""

OPERATIONS: Any = SimpleNamespace(
    unsafe_view=find("torch:ops.aten._unsafe_view.default"),
    to_copy=find("torch:ops.aten._to_copy.default"),
    softmax=find("torch:ops.aten._softmax.default"),
    log_softmax=find("torch:ops.aten._log_softmax.default"),
)
"""Operations in graphs of :func:`traced_graph`, by name. Fallback: none of these is found in a graph."""

EXPORT_LOGGER = "torch.onnx._internal.exporter._registration"
"""Logger of ONNX export, which warns about packages that are not installed. Fallback: the warnings are seen."""


@needs("torch.autograd.forward_ad:_current_level")
def is_forward_mode() -> bool:
    """Return whether tensors may carry tangents, inside ``torch.func.jvp`` or a level of ``torch.autograd.forward_ad``.

    Tangents are also propagated under ``torch.no_grad``. Replacement: call ``unpack_dual`` on every tensor.
    """
    return cast(Any, forward_ad)._current_level >= 0


def is_known(size: int) -> bool:
    """Return whether a size has one value, instead of a symbol that ``torch.compile`` or ``torch.export`` traces.

    Fallback: False while compiling.
    """
    if not is_compiling():
        return not isinstance(size, torch.SymInt)
    return _has_static_value(size)


_has_static_value: Callable[[Any], bool] = find(
    "torch.fx.experimental.symbolic_shapes:has_static_value", lambda size: False
)


@needs("torch:compiler._is_exporting_flag", fallback=torch.compiler.is_exporting)
def is_exporting() -> bool:
    """Return whether ``torch.export`` is tracing the call.

    In torch 2.11, ``torch.compiler.is_exporting()`` is also true under ``torch.compile``. Fallback: use that function.
    """
    return cast(Any, torch.compiler)._is_exporting_flag


@_reads("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
def has_hooks(module: nn.Module) -> bool:
    """Return whether ``module`` itself has hooks. Replacement: run every module through ``__call__``."""
    own: dict[str, Any] = vars(module)
    return bool(
        own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    )


@_reads("_forward_hooks", "_forward_pre_hooks")
def hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward hooks of ``module`` itself. Replacement: as for :func:`has_hooks`."""
    own: dict[str, Any] = vars(module)
    return [*own["_forward_pre_hooks"].items(), *own["_forward_hooks"].items()]


has_global_hooks: Callable[[], bool] = find("torch.nn.modules.module:_has_any_global_hook")
"""Return whether global module hooks are registered. Replacement: as for :func:`has_hooks`."""


_global_step_hooks: Sequence[dict[int, Any]] = (
    find("torch.optim.optimizer:_global_optimizer_pre_hooks"),
    find("torch.optim.optimizer:_global_optimizer_post_hooks"),
)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks run before or after the steps of ``optimizer``. Replacement: call its ``step``."""
    own: Any = optimizer
    try:
        return bool(own._optimizer_step_pre_hooks or own._optimizer_step_post_hooks) or any(_global_step_hooks)
    except AttributeError as error:
        raise absent_error("torch:optim.Optimizer._optimizer_step_pre_hooks") from error


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Return whether a leaf has hooks on its gradient, before or after it is accumulated.

    Replacement: run the backward pass of torch on every tensor.
    """
    hooked: Any = tensor
    try:
        return bool(hooked._backward_hooks or hooked._post_accumulate_grad_hooks)
    except AttributeError as error:
        raise absent_error("torch:Tensor._backward_hooks") from error


@_reads("_modules")
def children_of(module: Any) -> dict[str, nn.Module | None]:
    """Return the live dict of the children of ``module``. Replacement: ``torch.nn.Module.named_children``."""
    return module._modules


@_reads("_parameters")
def parameters_of(module: Any) -> dict[str, nn.Parameter | None]:
    """Return the live dict of the parameters of ``module``, without those of its submodules.

    Replacement: ``named_parameters(recurse=False)``.
    """
    return module._parameters


@_reads("_parameters", "_buffers")
def tensors_of(module: Any) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    """Return the live dicts of the parameters and of the buffers of ``module``, without those of its submodules.

    Used to swap tensors in and out. Replacement: ``torch.func.functional_call``.
    """
    return module._parameters, module._buffers


def rnn_kernel(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return the fused kernel of torch.nn for a cell, ``"lstm"`` or ``"gru"``, on packed sequences.

    Replacement: ``torch.nn.LSTM``, with its weights set by ``torch.func.functional_call``.
    """
    return _rnn_kernels[name]


_rnn_kernels = {"lstm": find("torch:_VF.lstm"), "gru": find("torch:_VF.gru")}


def trace() -> Any:
    """Return the tracing context of the current compilation, which holds settings and attributes set by recurl.

    Replacement: mark lengths as unbacked in the caller's code with ``torch._check``.
    """
    return load("torch._guards:TracingContext.get")()


def schema_of(target: Any) -> Any:
    """Return the schema of an operation (its arguments, mutations and aliases), or None for other functions.

    Fallback: a table of the known operations.
    """
    return getattr(target, "_schema", None)


@cache
def _replacing() -> type[Any]:
    """Return the class of the contexts that :func:`running_by` creates."""
    base: Any = load("torch.utils._python_dispatch:TorchDispatchMode")

    class Replacing(base):
        def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
            super().__init__()
            self._run = run

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return self._run(func, args, kwargs or {})

    return Replacing


def running_by(run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Return a context in which ``run(operation, arguments, named arguments)`` replaces every operation.

    Replacement: don't compile functions that draw random numbers, and don't check for read-backs on the CPU; CUDA has
    ``torch.cuda.set_sync_debug_mode``.
    """
    return _replacing()(run)


_compiling: ContextVar[bool] = ContextVar("recurl compiles", default=False)
_torch_compiles, _recurl_compiles = torch.compiler.is_compiling, _compiling.get  # bound, for fast calls


def is_compiling() -> bool:
    """Return whether this call is traced: by ``torch.compile``, ``torch.export``, or inside :func:`compiling`.

    Dynamo folds ``torch.compiler.is_compiling()`` to True, so that it never reads the context variable.

    Example:
        >>> with compiling():
        ...     is_compiling(), torch.compiler.is_compiling()
        (True, False)
    """
    return _torch_compiles() or _recurl_compiles()


@contextmanager
def compiling() -> Generator[None]:
    """Make :func:`is_compiling` true inside the block, in this thread only, so that kernels are called as operators.

    Backward passes run in this thread too, also on a GPU, so that they see it.
    """
    token = _compiling.set(True)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _compiling.reset(token)


_WARNINGS, _THREADS = "PYTHONWARNINGS", "TORCHINDUCTOR_COMPILE_THREADS"


def start_compilers() -> None:
    """Start the processes in which Inductor compiles kernels for a GPU, which takes seconds, in the background.

    Until they run, it compiles one kernel after another in this process. Fallback: it always begins so. Warnings of
    these processes, which compile code that Inductor wrote, aren't shown unless PYTHONWARNINGS is set.
    """
    given = os.environ.get(_WARNINGS)
    os.environ[_WARNINGS] = given or "ignore"
    try:
        with suppress(UnsupportedError):
            load("torch._inductor.async_compile:maybe_warm_pool")()
    finally:
        if given is None:
            del os.environ[_WARNINGS]


def limit_compile_threads(count: int) -> None:
    """Limit the number of Inductor's compile processes, unless TORCHINDUCTOR_COMPILE_THREADS is set.

    Fallback: set that variable before torch is imported.
    """
    if _THREADS not in os.environ:
        load("torch._inductor.config").compile_threads = count


def compiler_environment() -> dict[str, str]:
    """Return the environment variables with which a process has as many of Inductor's compile processes as this one.

    Fallback: none, so that it has one for each core.
    """
    with suppress(UnsupportedError):
        return {_THREADS: str(load("torch._inductor.config").compile_threads)}
    return {}


def import_compiler() -> None:
    """Import Inductor, which takes seconds and would otherwise happen where it is first used."""
    with suppress(UnsupportedError):
        load("torch._inductor.compile_fx")


def traced_graph(function: Callable[..., Any], examples: Sequence[Tensor]) -> nn.Module:
    """Trace a function of tensors to a graph of ATen operations, gradients included, without computing.

    Replacement: ``torch.compile`` on the function itself, which must then be Python that Dynamo can read.
    """
    make_fx, code_generator = load("torch.fx.experimental.proxy_tensor:make_fx"), load("torch.fx.graph:CodeGen")
    different = [example.detach() for example in examples]  # the tracer merges arguments that are one tensor
    with torch.autograd.set_multithreading_enabled(False):  # so that the tracer sees the backward pass
        graph: Any = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*different)
    graph.graph.set_codegen(code_generator())  # positional arguments, independent of the function's parameter names
    _keep_constants(graph)
    graph.recompile()
    return graph


_OF_COLUMNS = {"max_pointwise_cat_inputs": 0, "max_complex_pointwise_cat_inputs": 0}


def inductor_program(
    graph: Any, kept: Sequence[Tensor], columns: bool = False, most_fused: int | None = None
) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph of :func:`traced_graph`, after :func:`lift_tensors`, with Inductor.

    One configuration of each pointwise kernel is compiled, instead of two that are timed at the first launch. Where a
    graph joins ``columns``, the kernels that compute them write them to their places in the result, so that no kernel
    remains that only concatenates.

    Replacement: ``torch.compile(graph.forward, fullgraph=True)``, where Dynamo reads the graph's code again, in a sixth
    of the compiler's time.

    Args:
        graph: the graph.
        kept: the tensors returned by :func:`lift_tensors`, which the compiled code reads in place.
        columns: whether the graph joins columns.
        most_fused: most operations that are fused into one kernel; the compiler's default when None.

    Raises:
        Exception: of any type: the compiler, or one that it calls, failed.
    """
    given = _values_of_inputs(graph, kept)
    mode = given[0].fake_mode if given else load("torch._subclasses.fake_tensor:FakeTensorMode")()
    program = _compiled(_bare(graph), [*given, *map(mode.from_tensor, kept)], _options(columns, most_fused))
    return lambda *tensors: program(*tensors, *kept)


def _values_of_inputs(graph: Any, kept: Sequence[Tensor]) -> list[Any]:
    """Return the fake tensors with which a graph was traced, for its inputs except the lifted tensors."""
    given = [node for node in graph.graph.nodes if node.op == "placeholder"][: -len(kept) or None]
    return [node.meta["val"] for node in given]


def _bare(graph: Any) -> Any:
    """Return a graph without the tensors that it held, which the compiler would take for further inputs."""
    return load("torch.fx:GraphModule")({}, graph.graph)


@torch.no_grad()
def _compiled(graph: Any, examples: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any]:
    with _saved_by_name(), _scattered_once():
        return load("torch._inductor:compile")(graph, examples, options)


def _options(columns: bool, most_fused: int | None = None) -> dict[str, Any]:
    # Without padding: with it, slices of padded rows wider than 1024 were read at wrong addresses (torch 2.11, CUDA).
    options: dict[str, Any] = {
        "deterministic": True,
        "triton.autotune_pointwise": False,
        "comprehensive_padding": False,
    }
    if columns:
        config = load("torch._inductor.config")
        options |= {name: value for name, value in _OF_COLUMNS.items() if hasattr(config, name)}
    return options if most_fused is None else {**options, "max_fusion_size": most_fused}


@contextmanager
def _saved_by_name() -> Generator[None]:
    """Let pickle save memory formats by their names inside the block.

    It saves them with the first module that it finds torch in, which depends on what was imported. So would the keys of
    the compiler's cache, and processes would not find each other's programs.
    """
    kind, table = torch.memory_format, copyreg.dispatch_table
    before = table.get(kind)
    copyreg.pickle(kind, _by_name)
    try:
        yield
    finally:
        if before is None:
            del table[kind]
        else:
            table[kind] = before


@contextmanager
def _scattered_once() -> Generator[None]:
    """Let Inductor's kernels for several CPU threads add to the right addresses inside the block.

    Where a kernel works on tiles, it counts a tile's inner index twice in the addresses that it adds to atomically, and
    writes out of bounds (torch 2.13; corrected alike in https://github.com/pytorch/pytorch/pull/191861).
    """
    tiles = load("torch._inductor.codegen.cpp:CppTile2DKernel")
    settings, store = load("torch._inductor.config:cpp"), tiles.store

    def once(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        atomic = mode == "atomic_add" and (settings.dynamic_threads or self.num_threads != 1)
        if atomic and not self.need_vec_transpose(self.rename_indexing(index)):
            super(tiles, self).store(name, index, value, mode)
        else:
            store(self, name, index, value, mode)

    tiles.store = once
    try:
        yield
    finally:
        tiles.store = store


def _by_name(value: torch.memory_format) -> tuple[Callable[[str], torch.memory_format], tuple[str]]:
    return _memory_format, (str(value),)


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name.removeprefix("torch."))


def compiler_cache() -> Path:
    """Return the folder of Inductor's cache. Replacement: the variable TORCHINDUCTOR_CACHE_DIR."""
    return Path(load("torch._inductor.runtime.cache_dir_utils:cache_dir")())


def pack_program(graph: Any, kept: Sequence[Tensor], columns: bool) -> bytes | None:
    """Return a program as bytes, for :func:`compile_packed`, with all that the compiled code depends on.

    These are torch's settings and version, and the GPUs; Inductor's settings are not among them.

    The arguments are those of :func:`inductor_program`.

    Returns:
        the bytes, or None if the graph has something that pickle can't save, such as a loop.
    """
    inputs = [*_values_of_inputs(graph, kept), *kept]
    examples = [(value.shape, value.stride(), value.dtype, value.device) for value in inputs]
    gpus = sorted({torch.cuda.get_device_name(value.device) for value in inputs if value.device.type == "cuda"})
    packed = io.BytesIO()
    packer = _Packer(packed)
    try:
        packer.dump((torch.__version__, gpus))
        packer.dump((len(graph.graph.nodes), examples, _options(columns), _settings()))
        for node in graph.graph.nodes:
            packer.dump((node.op, node.target, node.args, node.kwargs, node.name))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return None
    return packed.getvalue()


def compile_packed(program: bytes) -> None:
    """Compile a program of :func:`pack_program` into the compiler's cache, where :func:`inductor_program` finds it.

    Its operators must be defined. Torch's settings are changed. Replacement: compile it in the process that runs it.
    """
    unpacker = _Unpacker(io.BytesIO(program))
    unpacker.load()  # the version and the GPUs, which are those of this process
    count, examples, options, settings = unpacker.load()
    _set(*settings)
    graph = load("torch.fx:Graph")()
    for _ in range(count):
        op, target, arguments, named, name = unpacker.load()
        unpacker.nodes[name] = graph.create_node(op, target, arguments, named, name)
    shapes = load("torch.fx.experimental.symbolic_shapes:ShapeEnv")()
    with load("torch._subclasses.fake_tensor:FakeTensorMode")(shape_env=shapes):
        fakes = [torch.empty_strided(size, stride, dtype=dtype, device=on) for size, stride, dtype, on in examples]
    _compiled(load("torch.fx:GraphModule")({}, graph), fakes, options)


def _settings() -> tuple[Any, ...]:
    """Return the settings of torch that compiled code depends on, for :func:`_set`."""
    was_set = torch.backends.cuda.matmul.fp32_precision != "none"
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision() if was_set else None,
        torch.get_default_dtype(),
        (torch.are_deterministic_algorithms_enabled(), only_warns),
    )


def _set(threads: int, precision: str | None, dtype: torch.dtype, deterministic: tuple[bool, bool]) -> None:
    torch.set_num_threads(threads)
    if precision is not None:
        torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)
    if deterministic[0]:
        torch.use_deterministic_algorithms(True, warn_only=deterministic[1])


class _Packer(pickle.Pickler):
    """Writes references to nodes of a graph and to operators as their names."""

    def __init__(self, packed: io.BytesIO) -> None:
        super().__init__(packed, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = {**copyreg.dispatch_table, torch.memory_format: _by_name}
        self._node, self._operator = load("torch.fx:Node"), load("torch._ops:OpOverload")

    def persistent_id(self, value: Any) -> object:
        if isinstance(value, self._node):
            return value.name
        if isinstance(value, self._operator):
            namespace, _, name = value.name().partition("::")
            operation, _, overload = name.partition(".")
            return namespace, operation, overload or "default"
        return None


class _Unpacker(pickle.Unpickler):
    """Reads what :class:`_Packer` has written.

    Attributes:
        nodes: the nodes by name.
    """

    def __init__(self, packed: io.BytesIO) -> None:
        super().__init__(packed)
        self.nodes: dict[str, Any] = {}

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, str):
            return self.nodes[name]
        namespace, operation, overload = name
        return getattr(getattr(getattr(torch.ops, namespace), operation), overload)


def lift_tensors(graph: Any) -> list[Tensor]:
    """Turn the tensors held by a graph of :func:`traced_graph` into further arguments, and return them detached."""
    given = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [tensor.detach() for tensor in _lifted(graph, given)]


def _lifted(graph: Any, given: Sequence[Any]) -> list[Tensor]:
    """Turn the tensors held by a graph into further arguments, and return them."""
    names = dict.fromkeys(node.target for node in graph.graph.nodes if node.op == "get_attr")
    nodes = list(graph.graph.nodes)
    with graph.graph.inserting_before(nodes[len(given)]):
        arguments = {name: graph.graph.placeholder(f"kept{number}") for number, name in enumerate(names)}
    for node in nodes:
        if node.op == "get_attr":
            node.replace_all_uses_with(arguments[node.target])
            graph.graph.erase_node(node)
    graph.recompile()
    return [attrgetter(name)(graph) for name in names]


def _keep_constants(graph: Any) -> None:
    """Keep tensors made by ``torch.tensor`` from Python numbers on their device, so that no run copies them there."""
    copies = (torch.ops.aten.lift_fresh_copy.default, OPERATIONS.to_copy)
    for number, node in enumerate(list(graph.graph.nodes)):
        source = node.args[0] if node.target in copies else None
        if source is None or source.op != "get_attr" or _is_edited(node):
            continue
        if node.target is copies[1] and not source.meta.get("constant"):
            continue  # a tensor of the caller, which may change
        name = f"_kept_constant{number}"
        graph.register_buffer(name, node.target(getattr(graph, source.target), **node.kwargs), persistent=False)
        with graph.graph.inserting_before(node):
            kept = graph.graph.get_attr(name)
        kept.meta = {**node.meta, "constant": True}
        node.replace_all_uses_with(kept)
        graph.graph.erase_node(node)


def _is_edited(node: Any) -> bool:
    """Return whether a value, or a view of it, may be changed in place: by the graph, or by the user of its results."""
    for user in node.users:
        if user.op == "output":
            return True
        schema = schema_of(user.target)
        views = schema is not None and any(found.alias_info is not None for found in schema.returns)
        if schema is not None and (schema.is_mutable or (views and _is_edited(user))):
            return True
    return False


class CompletedState(nn.Module):
    """Module that completes a state dict saved by an earlier version before it is loaded."""

    def complete_state(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Add missing entries to ``state_dict``, whose keys begin with ``prefix``."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.complete_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class NotifiedModule(nn.Module):
    """Module that is told when its tensors were moved or converted, as by ``to`` or ``double``.

    Fallback: it isn't told.
    """

    def on_conversion(self, before: torch.dtype) -> None:
        """React to a conversion, from the dtype ``before``."""
        raise NotImplementedError

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = cast(Any, self).dtype
        super()._apply(fn, recurse)
        self.on_conversion(before)
        return self
