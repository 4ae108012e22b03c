"""Compilation of a function of tensors by Inductor, which fuses its operations into few kernels."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from recurl.core.errors import RecurlError, UnsupportedError
from recurl.core.messages import quiet, quiet_if_failing, warn_once
from recurl.core.torch_compat import (
    compiling,
    import_compiler,
    inductor_program,
    lift_tensors,
    pack_program,
    running_by,
    start_compilers,
    traced_graph,
)
from recurl.execution.background import cache_mark, compile_ahead, is_later
from recurl.execution.columns import ColumnLayout, scalarize_loop, split_columns, take_constants
from recurl.execution.explain import NotCompiled, compiler_failed, first_line
from recurl.execution.readback import refuse_read_back
from recurl.execution.small_products import small_product

__all__ = ["InductorFunction"]

_CUT = 16  # most operations fused into a kernel, where Triton can't compile larger ones
_COMPILER = threading.RLock()  # tracers of torch, and what is held back meanwhile, belong to the process
_SUMS_ON = ("cuda",)  # devices where thin products are faster as sums; on a CPU the matrix library is faster
_BY_PROCESSES = ("cuda",)  # devices for which the compiler starts processes, and so do we
_Function = Callable[..., tuple[Tensor, ...]]
_Draw = Callable[[], Tensor]
_Compiled = Callable[..., Sequence[Tensor]]


class InductorFunction:
    """A function of tensors, compiled by Inductor, the compiler of ``torch.compile``.

    The function is run once, then traced with fake tensors, which have shapes but no numbers. It may use any Python
    (TensorDicts, modules, autograd). Other tensors that it reads (weights, buffers) are read at every call from the
    same memory: they may change in place and must not be replaced.

    Random numbers are those that the function would draw, in the same order. They are drawn first and passed to the
    compiled code. Sums may be rounded differently than in the function. The compiled code itself always gives the same
    bits, also inside a CUDA graph: the compiler must not choose reductions by measurement, because another process
    could choose differently.

    Inside a block of :func:`~recurl.execution.background.compiled_later`, the function is only traced: :meth:`compile`
    or the first call compiles it.

    Where the compiler fails, the function is compiled again to smaller kernels, and where that fails too, it can't be
    compiled. A one-line warning says which. The compiled function is run once on the examples, because compilers may
    also fail when a kernel is first launched, which must not happen while a CUDA graph is captured.

    Args:
        function: maps tensors to a tuple of tensors, without side effects.
        examples: tensors with the shapes, strides, dtypes and devices of those of every call.
        generators: random generators that it draws from, besides torch's default ones. None is advanced here.
        rows: for a repeated step, whose last results are the arguments of the next: the size of a dimension that most
            tensors have, with few entries in the other dimensions. On a GPU, such narrow tensors are computed column by
            column (see :func:`recurl.execution.columns.scalarize_columns`), in fewer kernels. The compiled function
            then takes and returns their vectors instead of them, and its results must not be changed in place.
        name: what the function is, for warnings.

    Attributes:
        entering: layout of each argument that is passed as vectors, None for one that is passed whole.
        leaving: layout of each result, likewise.

    Raises:
        UnsupportedError: the function reads the values of tensors back, or its random numbers depend on them, as with
            ``torch.multinomial``; the message names the line, or the operation.
        CompilerFailed: the compiler failed, here or at the first call that compiles. No generator was advanced: call
            the function instead.

    Example:
        >>> weight = torch.ones(2)
        >>> noisy = InductorFunction(lambda x: (x * weight + torch.rand(2),), [torch.zeros(2)])
        >>> _ = weight.fill_(3.0), torch.manual_seed(0)
        >>> noisy(torch.ones(2))[0], 3.0 + torch.manual_seed(0).initial_seed() + torch.rand(2)
        (tensor([3.4963, 3.7682]), tensor([3.4963, 3.7682]))
    """

    def __init__(
        self,
        function: _Function,
        examples: Sequence[Tensor],
        generators: Sequence[torch.Generator] = (),
        rows: int | None = None,
        *,
        name: str = "a function",
    ) -> None:
        count = len(examples)
        sums = any(tensor.device.type in _SUMS_ON for tensor in examples)
        drawn: list[Tensor] = []
        self._draws: list[_Draw] = []

        def draw(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            result = operation(*arguments, **named)
            if _is_random(operation):
                self._draws.append(_draw_again(operation, arguments, named, result))
                drawn.append(result.clone())
            return result

        def given(*tensors: Tensor) -> tuple[Tensor, ...]:
            left = iter(tensors[count:])

            def take(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
                if _is_random(operation):
                    return arguments[0].copy_(next(left)) if _in_place(operation) else next(left)
                small = small_product(operation, arguments) if sums and not named else None
                return operation(*arguments, **named) if small is None else small

            with running_by(take):
                return function(*tensors[:count])

        with compiling():
            own = _generators_of({tensor.device for tensor in examples})
            with _restoring([*generators, *own]), running_by(draw), refuse_read_back():
                function(*examples)
            try:
                with _COMPILER:
                    graph: Any = traced_graph(given, [*examples, *drawn])
            except (RecurlError, NotCompiled, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever the tracer can't read
                raise compiler_failed(name, error) from error
        self.entering: list[ColumnLayout | None] = [None] * count
        *_, output = graph.graph.nodes
        self.leaving: list[ColumnLayout | None] = [None] * len(output.args[0])
        self._constant: dict[int, Tensor] = {}
        if rows is not None and sums:
            graph, self.entering, self.leaving = scalarize_loop(graph, rows, count)
            self._constant = take_constants(graph)
        entering = [tensor.contiguous() for tensor in split_columns(self.entering, examples)]
        arguments = [*(entering if rows is not None else examples), *drawn]
        self._program: _Program | None = _Program(graph, arguments, rows is not None, name)
        if not is_later():
            self.compile()

    def compile(self) -> None:
        """Compile the function, unless it is compiled.

        Raises:
            CompilerFailed: the compiler failed.
        """
        if self._program is not None:
            self._run = self._program.compile()
            self._program = None

    @torch.no_grad()
    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the compiled function. Its results are not connected to its arguments by gradients."""
        self.compile()
        results = [*self._run(*tensors, *[draw() for draw in self._draws])]
        for position, tensor in self._constant.items():
            results.insert(position, tensor)
        return tuple(results)


class _Program:
    """A traced graph, which begins to be compiled in the background if it is compiled later.

    Args:
        graph: the graph.
        examples: its arguments.
        columns: whether it joins columns.
        name: what it is, for warnings.
    """

    def __init__(self, graph: Any, examples: Sequence[Tensor], columns: bool, name: str) -> None:
        self._graph, self._examples, self._columns, self._name = graph, examples, columns, name
        self._kept = lift_tensors(graph)
        by_processes = any(tensor.device.type in _BY_PROCESSES for tensor in examples)
        program = pack_program(graph, self._kept, columns) if by_processes else None
        self._mark = None if program is None else cache_mark(program)
        self._wait: Callable[[], None] | None = None
        if by_processes and (self._mark is None or not os.path.exists(self._mark)):  # or can't be read
            if program is not None and is_later():
                self._wait = compile_ahead(program)
            else:
                start_compilers()

    def compile(self) -> _Compiled:
        """Compile the graph and run it once, with smaller kernels if that fails.

        Raises:
            CompilerFailed: it fails again.
        """
        if self._wait is not None:
            import_compiler()
            self._wait()
        failure = None
        for most_fused in (None, _CUT):
            try:
                with _COMPILER, quiet_if_failing(), quiet("torch", logging.ERROR), torch.no_grad():
                    run = inductor_program(self._graph, self._kept, self._columns, most_fused)
                    run(*self._examples)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises
                failure = error
            else:
                if failure is None:
                    self._remember()
                else:
                    reason = first_line(failure)
                    said = f"The compiler failed on {self._name} ({reason})"
                    warn_once(f"{said}: it gets at most {_CUT} operations per kernel.")
                return run
        assert failure is not None
        raise compiler_failed(self._name, failure) from failure

    def _remember(self) -> None:
        if self._mark is not None:
            with suppress(OSError):
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()


def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


def _in_place(operation: Any) -> bool:
    return operation.overloadpacket.__name__.endswith("_")


def _draw_again(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> _Draw:
    """Return a function that repeats a random draw, which may depend on a shape only."""
    shaped = _in_place(operation) or operation.overloadpacket.__name__.endswith("_like")
    others = [*arguments[shaped:], *named.values()]
    if not isinstance(result, Tensor) or any(isinstance(value, Tensor) for value in others):
        raise UnsupportedError(
            f"A compiled function must draw random numbers that don't depend on tensors, but {operation} does: draw "
            "them with torch.rand, torch.randn or exponential_(), and compute with them."
        )
    if not shaped:
        return lambda: operation(*arguments, **named)
    size, stride, dtype, device = result.shape, result.stride(), result.dtype, result.device

    def draw() -> Tensor:
        like = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return operation(like, *arguments[1:], **named)

    return draw


def _generators_of(devices: set[torch.device]) -> list[torch.Generator]:
    """Return torch's default generators of the devices, and that of the CPU."""
    cuda = [torch.cuda.default_generators[device.index] for device in devices if device.type == "cuda"]
    return [torch.default_generator, *cuda]


@contextmanager
def _restoring(generators: Sequence[torch.Generator]) -> Generator[None]:
    """Restore the states of generators at the end of the block."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
