"""A function of tensors as one compiled program: few kernels in place of one for every operation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recurl._torch import compiler_error, compiling, inductor_program, lift_tensors, running_by, traced_graph
from recurl.columns import Narrow, loop_by_columns, take_constants
from recurl.errors import UnsupportedError
from recurl.quiet import quiet_if_failing
from recurl.readback import refuse_read_back
from recurl.small_products import small_product

__all__ = ["Traced"]

_CUT = 16  # operations of a kernel at most, where Triton can't compile larger ones
_ONE_BY_ONE = "Its operations run one by one, uncompiled: the same results, more slowly."
_SUMS_ON = ("cuda",)  # devices where thin products are quicker as sums; a CPU's library of products is better
_Function = Callable[..., tuple[Tensor, ...]]
_Draw = Callable[[], Tensor]


class Traced:
    """Runs a function of tensors as a program that Inductor, the compiler of ``torch.compile``, makes of it.

    The function is run once, then traced with tensors that have shapes but no numbers, whatever Python it is made of
    (TensorDicts, modules, autograd). Other tensors that it reads (weights, buffers) are read where they are, so they
    may change in place and must not be replaced.

    Random numbers are those that the function would draw, in the same order: they are drawn first, the program computes
    with them. Sums may be rounded otherwise than by the function. The program itself always gives the same bits, also
    inside a CUDA graph. The compiler is told not to measure how to sum, for another start could choose otherwise.

    Where the compiler fails, the program is cut into smaller kernels, and where that fails too, its operations run one
    by one, uncompiled; a warning of one line says which.

    Args:
        function: maps tensors to a tuple of tensors, and changes nothing else.
        examples: tensors like those of every call: shapes, strides, dtypes, devices.
        generators: random generators that it draws from, besides torch's own. No generator advances here.
        rows: for a step that is repeated, whose last results are the arguments of the next: size of a dimension that
            most tensors have, of which few other numbers are. On a GPU they are computed column by column (see
            :func:`recurl.columns.by_columns`), in fewer kernels. The program then takes and returns the vectors of
            those that are narrow in place of them, and its results must not be changed in place.

    Attributes:
        entering: how each argument is taken apart, None where it enters whole.
        leaving: how each result is.

    Raises:
        UnsupportedError: the function reads the numbers of tensors back, or what it draws depends on them, as by
            ``torch.multinomial``; the message names the line, or the operation.

    Example:
        >>> weight = torch.ones(2)
        >>> noisy = Traced(lambda x: (x * weight + torch.rand(2),), [torch.zeros(2)])
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
    ) -> None:
        count = len(examples)
        sums = any(tensor.device.type in _SUMS_ON for tensor in examples)
        drawn: list[Tensor] = []
        self._draws: list[_Draw] = []

        def draw(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            result = operation(*arguments, **named)
            if _is_random(operation):
                self._draws.append(_draw_again(operation, arguments, named, result))
                drawn.append(torch.empty_like(result))
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
            with _kept([*generators, *own]), running_by(draw), refuse_read_back():
                function(*examples)
            graph: Any = traced_graph(given, [*examples, *drawn])
        self.entering: list[Narrow | None] = [None] * count
        *_, output = graph.graph.nodes
        self.leaving: list[Narrow | None] = [None] * len(output.args[0])
        self._constant: dict[int, Tensor] = {}
        if rows is not None and sums:
            graph, self.entering, self.leaving = loop_by_columns(graph, rows, count)
            self._constant = take_constants(graph)
        self._run = _compile(graph, columns=rows is not None)

    @torch.no_grad()
    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the program; what it returns is not connected to its arguments by gradients."""
        results = [*self._run(*tensors, *[draw() for draw in self._draws])]
        for position, tensor in self._constant.items():
            results.insert(position, tensor)
        return tuple(results)


def _compile(graph: Any, columns: bool) -> Callable[..., Sequence[Tensor]]:
    """Return a traced graph as a program, of smaller kernels or uncompiled where the compiler fails."""
    kept, operations = lift_tensors(graph), sum(node.op == "call_function" for node in graph.graph.nodes)
    for most_fused, instead in (
        (None, f"It is compiled again, {_CUT} operations a kernel at most."),
        (_CUT, _ONE_BY_ONE),
    ):
        try:
            with quiet_if_failing():
                return inductor_program(graph, kept, columns, most_fused)
        except compiler_error() as error:
            warnings.warn(
                f"torch's compiler failed on a program of {operations} operations ({_reason(error)}). {instead}",
                stacklevel=2,
            )
    return lambda *tensors: graph(*tensors, *kept)


def _reason(error: Exception) -> str:
    """Return the line of a compiler's error that says what happened: the last one of a traceback that it holds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "TORCH" not in line]
    found = lines[-1] if any(line.startswith("Traceback") for line in lines) else lines[0]
    return found[:200]


def _is_random(operation: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


def _in_place(operation: Any) -> bool:
    return operation.overloadpacket.__name__.endswith("_")


def _draw_again(operation: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> _Draw:
    """Return what draws again what an operation drew, which must depend on nothing but a shape."""
    shaped = _in_place(operation) or operation.overloadpacket.__name__.endswith("_like")
    others = [*arguments[shaped:], *named.values()]
    if not isinstance(result, Tensor) or any(isinstance(value, Tensor) for value in others):
        raise UnsupportedError(
            f"What is compiled must draw random numbers that don't depend on tensors, but {operation} does: draw them "
            "by torch.rand, torch.randn or exponential_(), and compute with them."
        )
    if not shaped:
        return lambda: operation(*arguments, **named)
    size, stride, dtype, device = result.shape, result.stride(), result.dtype, result.device

    def draw() -> Tensor:
        like = torch.empty_strided(size, stride, dtype=dtype, device=device)
        return operation(like, *arguments[1:], **named)

    return draw


def _generators_of(devices: set[torch.device]) -> list[torch.Generator]:
    """Return torch's own generators that operations on the devices draw from."""
    cuda = [torch.cuda.default_generators[device.index] for device in devices if device.type == "cuda"]
    return [torch.default_generator, *cuda]


@contextmanager
def _kept(generators: Sequence[torch.Generator]) -> Generator[None]:
    """Set generators back at the end to where they were."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
