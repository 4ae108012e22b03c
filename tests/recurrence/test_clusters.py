"""CUDA C++ kernels run on a CPU with emulated instructions, to test their indices, order and exchanges."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import recurl.recurrence.cuda
from recurl.core.relative_error import relative_error
from recurl.recurrence.cuda import definition

from .kernel_tests import but_first

pytestmark = pytest.mark.slow

KERNELS = Path(recurl.recurrence.cuda.__file__).parent
INSTRUCTIONS = Path(__file__).with_name("emulated_instructions.cpp")
ENTRY = """
extern "C" void run(const i64* words, int clusters) {
    Arguments arguments;
    std::memcpy(&arguments, words, sizeof arguments);
    run_clusters(clusters, [arguments] { KERNEL_NAME(arguments); });
}
"""
LIMITS = {"tf32": 2e-3, "bf16": 2e-3, "ieee": 1e-6}  # operands of 11 bits, and of 22
Run = Callable[..., None]


@dataclass(frozen=True)
class Size:
    """Units of a layer and parameters of its kernels: see cluster.cu and, for 0 members, rows.cu."""

    hidden: int
    width: int
    members: int = 0
    held: int = 0
    slots: int = 16

    @property
    def kernels(self) -> str:
        return "cluster" if self.members else "rows"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool, str, Size], Run]:
    """Return the function that runs a kernel, for a direction, a cell, a precision and a size."""

    def build(direction: str, lstm: bool, kind: str, size: Size) -> Run:
        folder = tmp_path_factory.mktemp(direction)
        sources = [INSTRUCTIONS, KERNELS / "gates.cu", KERNELS / size.kernels / f"{size.kernels}.cu"]
        entry = ENTRY.replace("KERNEL_NAME", f"{size.kernels}_{direction}_kernel")
        source = "".join(path.read_text() for path in sources) + entry
        (folder / "walk.cpp").write_text(source)
        numbers = {"FORWARD": direction == "forward", "HIDDEN": size.hidden, "WIDTH": size.width}
        numbers |= {"MEMBERS": size.members or 1, "HELD": size.held, "LSTM": lstm, "EXACT": kind == "ieee"}
        numbers |= {"KEEP": 1, "TO_STORED": 1, "PROGRAMS": 1, "BITS": 16 if kind == "bf16" else 32}
        defined = [f"-D{key}={int(value)}" for key, value in numbers.items()]
        command = ["c++", "-std=c++17", "-O1", "-w", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", "-pthread", *defined]
        subprocess.run([*command, "walk.cpp", "-o", "walk.so"], cwd=folder, check=True)
        library = ctypes.CDLL(str(folder / "walk.so"))

        def run(*arguments: Any) -> None:
            words = [value if isinstance(value, int) else value.data_ptr() for value in arguments]
            library.run((ctypes.c_int64 * len(words))(*words), size.slots // 8 if size.members else size.slots)

        return run

    return build


class Case:
    """Random segments with the tensors that a layer saves, and the reference in float64."""

    def __init__(self, lstm: bool, kind: str, size: Size) -> None:
        torch.manual_seed(0)
        self.hidden, width = size.hidden, size.width
        self.lstm, self.gates = lstm, 4 if lstm else 3
        self.dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        self.tokens = 131
        self.starts = (torch.rand(self.tokens) < 0.25).byte()
        self.starts[0] = 1
        self.starts[60:90] = 0  # so that slots are empty
        first = self.starts.nonzero()[:, 0]
        share = -(-self.tokens // size.slots)
        first = torch.cat([first, torch.tensor([self.tokens])])
        self.bounds = first[torch.searchsorted(first, torch.arange(size.slots + 1) * share).clamp(max=len(first) - 1)]
        self.w = torch.randn(self.gates * size.hidden, size.hidden) / size.hidden**0.5
        self.w[:, 3] *= 1e-7  # below the range of float16, but large enough to matter
        self.b_hn = torch.randn(size.hidden)
        self.x = torch.randn(self.tokens, self.gates, size.hidden).to(self.dtype)
        wide = torch.randn(self.tokens, 3, size.hidden)
        self.stored = wide[:, 0], wide[:, 2]  # adjacent rows aren't adjacent in memory
        for state in self.stored:
            state[self.starts == 0] = float("nan")  # must not be read
        self.grads = torch.randn(self.tokens, size.hidden), torch.randn(size.hidden, self.tokens).t()
        padded = torch.zeros(self.tokens, self.gates, width, dtype=self.dtype)
        padded[..., : size.hidden] = self.x
        if lstm:
            self.input_gates = padded.transpose(1, 2).contiguous()
        else:
            r_z = padded[:, :2].transpose(1, 2).flatten(1)
            self.input_gates = torch.cat([padded[:, 2], r_z], 1)

    def exact(self) -> dict[str, Tensor]:
        """Return the results of the definition in float64."""
        starts, w, x = self.starts.bool(), self.w.double(), self.x.double()
        stored = tuple(state.double() for state in self.stored[: 1 + self.lstm])
        grads = tuple(grad.double() for grad in self.grads[: 1 + self.lstm])
        after, kept = definition.forward(x, self.b_hn.double(), w, stored, starts)
        to_gates, to_stored = definition.backward(grads, kept, w, stored, after, starts)
        found = {"after_h": after[0], "after_c": after[-1], "gates": kept.transpose(1, 2), "to_stored": to_stored}
        hidden = (to_gates if self.lstm else to_gates[:, [0, 1, 3]]).flatten(1)
        whole = torch.where(starts[:, None], hidden @ w + to_stored, 0)
        return {**found, "to_x": to_gates[:, : self.gates], "to_h": whole}


CLUSTER = [  # every precision with either cell
    *[("gru", "ieee", Size(96, 96, 2, 10)), ("lstm", "ieee", Size(100, 128, 8, 32))],
    *[("lstm", "tf32", Size(150, 160, 4, 32)), ("gru", "tf32", Size(180, 192, 8, 14))],
    *[(cell, "bf16", Size(150, 160, 4, 32)) for cell in ("lstm", "gru")],
]
ROWS = [
    *[("lstm", "ieee", Size(61, 64)), ("gru", "ieee", Size(72, 80, slots=1))],
    *[(cell, "tf32", Size(16, 16)) for cell in ("lstm", "gru")],
]


@pytest.mark.parametrize("lstm", [True, False])
def test_the_definition_has_the_gradients_of_autograd(lstm: bool) -> None:
    case = Case(lstm, "ieee", Size(5, 16))
    x, w = case.x.double().requires_grad_(), case.w.double()
    stored = [
        torch.where(case.starts.bool()[:, None], state, 0).double().requires_grad_()
        for state in case.stored[: 1 + lstm]
    ]
    after, _ = definition.forward(x, case.b_hn.double(), w, tuple(stored), case.starts.bool())
    loss = sum((state * grad.double()).sum() for state, grad in zip(after, case.grads, strict=False))
    assert isinstance(loss, Tensor)
    to_x, *to_stored = torch.autograd.grad(loss, [x, *stored])
    found = case.exact()
    torch.testing.assert_close(found["to_x"], to_x, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found["to_stored"] if lstm else found["to_h"], to_stored[-1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("cell", "kind", "size"), [*but_first(CLUSTER), *but_first(ROWS)], ids=str)
def test_kernels_agree_with_the_definition(
    program: Callable[[str, bool, str, Size], Run], cell: str, kind: str, size: Size
) -> None:
    case, limit = Case(cell == "lstm", kind, size), LIMITS[kind]
    tokens, lstm, exact = case.tokens, case.lstm, case.exact()
    after = [torch.full((tokens, size.hidden), float("nan")) for _ in range(2)]
    kept = torch.full((tokens, size.width, 4), float("nan"), dtype=torch.float32 if kind == "ieee" else torch.float16)
    states = [part for state in case.stored for part in (state, *state.stride())]
    sources = (case.starts, case.bounds)
    program("forward", lstm, kind, size)(case.input_gates, case.b_hn, case.w, *states, *sources, *after, kept)
    assert relative_error(after[0], exact["after_h"]) < limit
    assert relative_error(kept[:, : size.hidden], exact["gates"]) < limit
    if lstm:
        assert relative_error(after[1], exact["after_c"]) < limit

    back = program("backward", lstm, kind, size)
    grads = [part for grad in case.grads for part in (grad, *grad.stride())]
    results = []
    for _ in range(2):  # values arrive in another order, with the same bits
        grad_gates = torch.full((tokens, 4 * size.width), float("nan"), dtype=case.dtype)
        grad_stored = torch.zeros(tokens, size.hidden)
        rest = (states[3:] if lstm else states[:3], *sources)
        back(*grads, kept, case.w, *rest[0], *after, *rest[1:], grad_gates, grad_stored)
        results.append((grad_gates, grad_stored))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    grad_gates, grad_stored = results[0]
    limit = 2e-2 if kind == "bf16" else limit
    if lstm:
        to_x = grad_gates.view(tokens, size.width, 4)
        assert not to_x[:, size.hidden :].any()
        assert relative_error(to_x[:, : size.hidden].transpose(1, 2), exact["to_x"]) < limit
        assert relative_error(grad_stored, exact["to_stored"]) < limit
        return
    n, r_z, inner = grad_gates.split([size.width, 2 * size.width, size.width], 1)
    r_z = r_z.view(tokens, size.width, 2)
    assert relative_error(torch.stack([r_z[..., 0], r_z[..., 1], n], 1)[..., : size.hidden], exact["to_x"]) < limit
    to_hidden = torch.cat([r_z[:, : size.hidden].transpose(1, 2).flatten(1), inner[:, : size.hidden]], 1).double()
    whole = torch.where(case.starts.bool()[:, None], to_hidden @ case.w.double() + grad_stored, 0)
    assert relative_error(whole, exact["to_h"]) < limit
