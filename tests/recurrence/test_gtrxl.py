"""Windowed attention over segments: resets, stored windows, and numbers that aren't finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, UsageError
from recurl.modules import GTrXLModule, set_recurrent_mode
from recurl.recurrence import DEFAULT_OPTIONS, GTrXLCell, load_cell, segments
from recurl.recurrence.attention import chunked
from recurl.recurrence.cells import gtrxl
from recurl.sequences.index import SequenceIndex

INPUTS, HIDDEN = 3, 4


def memory(window: int = 3, **options: object) -> GTrXLModule:
    torch.manual_seed(0)
    options = {"num_layers": 2, "heads": 2, "dtype": torch.float64, "recurrent_backend": "loop", **options}
    return GTrXLModule(INPUTS, HIDDEN, window=window, in_key="x", out_key="y", **options)


def batch_of(rows: int, steps: int, window: int, starts: float = 0.2, layers: int = 2) -> TensorDict:
    """Random inputs, episode starts, and windows in which some inputs are present."""
    stored = torch.randn(rows, steps, layers, window, HIDDEN + 1, dtype=torch.float64)
    stored[..., -1] = (torch.rand(rows, steps, layers, window) < 0.6).double()
    x = torch.randn(rows, steps, INPUTS, dtype=torch.float64)
    entries = {"x": x, "recurrent_state": stored, "is_init": torch.rand(rows, steps, 1) < starts}
    return TensorDict(entries, [rows, steps])


def run(module: GTrXLModule, batch: TensorDict, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    module.recurrent_backend = backend
    with set_recurrent_mode(True):
        after = module(batch.clone())
    return after["y"], after["next", "recurrent_state"]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 17), st.integers(1, 6), st.sampled_from([0.0, 0.2, 1.0]), st.integers(0, 99))
def test_sequences_are_the_steps(rows: int, steps: int, window: int, starts: float, seed: int) -> None:
    module = memory(window)
    torch.manual_seed(seed)
    batch = batch_of(rows, steps, window, starts)
    found, wanted = (run(module, batch, backend) for backend in ("loop", "reference"))
    torch.testing.assert_close(found, wanted)


def test_layers_look_back_over_their_windows() -> None:
    """Two layers with windows of 3 see 6 steps back, and no further."""
    module, steps = memory(), 10
    x = torch.randn(1, steps, INPUTS, dtype=torch.float64, requires_grad=True)
    with set_recurrent_mode(True):
        y = module(TensorDict({"x": x, "is_init": torch.zeros(1, steps, dtype=torch.bool)}, [1, steps]))["y"]
    (gradient,) = torch.autograd.grad(y[0, -1].sum(), x)
    assert (gradient[0].abs().sum(-1) > 0).tolist() == [False] * 3 + [True] * 7


def test_a_reset_forgets() -> None:
    module = memory()
    batch = batch_of(1, 8, 3, starts=0.0)
    batch["is_init"][0, 4], batch["recurrent_state"][0, 4] = True, 0
    whole, after = run(module, batch, "loop")
    alone, after_alone = run(module, batch[:, 4:].exclude("recurrent_state"), "loop")
    torch.testing.assert_close((whole[:, 4:], after[:, 4:]), (alone, after_alone))
    assert after[0, 4, :, :, -1].sum(-1).tolist() == [1, 1]


@pytest.mark.parametrize("where", ["stream", "stored"])
def test_what_is_not_finite_reaches_only_those_that_attend_to_it(where: str) -> None:
    module = memory(num_layers=1)
    batch = batch_of(1, 12, 3, starts=0.0, layers=1)
    batch["is_init"][0, 6] = True
    batch["recurrent_state"][0, 0, 0, :, -1] = 1
    if where == "stream":
        batch["x"][0, 4, 1] = torch.inf
    else:
        batch["recurrent_state"][0, 0, 0, 1, 0] = torch.nan
    broken = run(module, batch, "loop")[0].isfinite().all(-1)[0]
    assert broken.logical_not().nonzero().flatten().tolist() == ([4, 5] if where == "stream" else [0, 1])
    torch.testing.assert_close(run(module, batch, "reference")[0].isfinite().all(-1)[0], broken)
    x = batch["x"].requires_grad_()
    (gradient,) = torch.autograd.grad(run(module, batch, "loop")[0].sum(), x)
    assert gradient[0, 6:].isfinite().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_gradients_that_are_not_finite_reach_only_what_was_attended_to(poison: float) -> None:
    module = memory(num_layers=1)
    batch = batch_of(1, 12, 3, starts=0.0, layers=1)
    batch["is_init"][0, 6] = True
    x = batch["x"].requires_grad_()
    y = run(module, batch, "loop")[0]
    grads = [torch.ones_like(y), torch.ones_like(y)]
    grads[1][0, 10] = poison
    clean, found = (torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in grads)
    assert (~found.isfinite().all(-1))[0].nonzero().flatten().tolist() == [7, 8, 9, 10]
    torch.testing.assert_close(found[0, [*range(7), 11]], clean[0, [*range(7), 11]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Distances and the softmax are computed in float32."""
    torch.manual_seed(0)
    exact = memory(64, num_layers=1, dtype=torch.float32)
    module = memory(64, num_layers=1, dtype=dtype)
    module.load_state_dict(exact.state_dict())
    batch = batch_of(2, 100, 64, layers=1)
    found = run(module, batch.apply(lambda value: value.to(dtype) if value.is_floating_point() else value), "loop")[0]
    wanted = run(exact, batch.apply(lambda value: value.float() if value.is_floating_point() else value), "loop")[0]
    error = (found.float() - wanted).abs().max() / wanted.abs().max()
    assert error < 8 * torch.finfo(dtype).eps


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_where_tensors_cannot_be_read(rows: int, steps: int, window: int, seed: int) -> None:
    """The number of stored windows is then that of the tokens."""
    module = memory(window)
    torch.manual_seed(seed)
    batch = batch_of(rows, steps, window, starts=0.3)
    wanted = run(module, batch, "loop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "readable", lambda value: False)
        torch.testing.assert_close(run(module, batch, "loop"), wanted)


def test_gradients() -> None:
    module = memory()
    batch = batch_of(2, 7, 3)

    def function(x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        stored = torch.cat([inputs, batch["recurrent_state"][..., -1:]], -1)
        return run(module, batch.copy().update({"x": x, "recurrent_state": stored}), "loop")[0]

    leaves = batch["x"], batch["recurrent_state"][..., :-1].clone()
    assert torch.autograd.gradcheck(function, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GTrXLCell(head_size=0), "head_size must be at least 1, got 0"),
        (lambda: GTrXLCell(gate_bias=float("nan")), "gate_bias must be finite, got nan"),
        (lambda: load_cell("gtrxl(window=0)"), "window must be at least 1, got 0"),
        (lambda: GTrXLModule(3, 8, heads=0, in_key="x", out_key="y"), "heads must be at least 1, got 0"),
    ],
)
def test_options_that_are_refused(make: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_a_module_whose_window_does_not_fit_into_memory_names_one_that_does() -> None:
    with pytest.raises(ArgumentError, match=r"of gtrxl\(window=1000000000\)\), and cpu has .* a window of [\d,]+ fits"):
        GTrXLModule(3, 8, window=10**9, in_key="x", out_key="y")


@pytest.mark.parametrize(
    ("owner", "name"), [(segments.Segments, "_kept"), (segments, "windowed_attention"), (gtrxl, "sinusoids")]
)
def test_windows_that_do_not_fit_into_memory_name_those_that_do(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    module, batch = memory(num_layers=1), batch_of(2, 5, 3, layers=1)
    monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(segments, "_free_on_host", lambda: 2 * 3 * 10 * (HIDDEN + 1) * 8)
    with pytest.raises(UsageError, match=r"The windows after 10 tokens, of 3 inputs of 4 numbers.*a window of 2 fits"):
        run(module, batch, "loop")
    monkeypatch.setattr(segments, "_free_on_host", lambda: 10**9)  # of which the process may not have so many
    with pytest.raises(UsageError, match="the memory of cpu; process fewer tokens at once"):
        run(module, batch, "loop")
    sparse = batch["recurrent_state"][:, ::5]
    with pytest.raises(UsageError, match="The windows after 10 tokens"):
        module.net.run(batch["x"], (sparse,), SequenceIndex.of(batch), "loop", DEFAULT_OPTIONS)
