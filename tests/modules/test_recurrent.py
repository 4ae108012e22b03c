from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from recurl.modules import (
    GRUModule,
    LSTMModule,
    RecurrentModule,
    canonicalize_rnn_subset,
    get_env_transforms_from_module,
    get_primers_from_module,
    set_recurrent_mode,
)
from recurl.recurrence import record_backends
from tests.modules.recurrent_cases import CELLS, HIDDEN, INPUTS, make, random_batch


def chain_of_steps(module: RecurrentModule, batch: TensorDict) -> tuple[Tensor, list[TensorDict]]:
    """Return features of stepping through the last dimension, feeding the state back except at ``is_init``."""
    features, after = [], []
    carried = None
    for t in range(batch.shape[-1]):
        step = batch[..., t].clone()
        if carried is not None:
            for key in module.state_keys:
                init = step["is_init"][..., None, None]
                step.set(key, torch.where(init, step[key], carried["next", key]))
        carried = module(step)
        features.append(carried["features"])
        after.append(carried)
    return torch.stack(features, len(batch.shape) - 1), after


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(9,), (1,), (4, 9), (2, 3, 5), (4, 1)], ids=str)
@pytest.mark.parametrize("backend", ["pad", "loop", "reference", "auto", "fastest"])
@pytest.mark.parametrize("cell", CELLS)
def test_steps_equal_one_recurrent_pass(cell: str, backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Return random resets (with zero states stored there) and random states carried over from before."""
    module = make(cell, num_layers=2, recurrent_backend=backend, dtype=dtype)
    batch = random_batch(module, shape, zero=True)
    stepped, after = chain_of_steps(module, batch)
    with set_recurrent_mode(True):
        replayed = module(batch.clone())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    scale = stepped.abs().max()
    assert (replayed["features"] - stepped).abs().max() <= tolerance * scale
    for key in module.state_keys:
        assert (replayed["next", key][..., -1, :, :] - after[-1]["next", key]).abs().max() <= tolerance


@pytest.mark.parametrize("cell", CELLS)
def test_projection_steps_and_replays(cell: str) -> None:
    if cell == "gru":
        with pytest.raises(TypeError, match="proj_size"):
            make(cell, proj_size=2)
        return
    module = make(cell, num_layers=2, proj_size=2, dtype=torch.float64)
    batch = random_batch(module, (3, 7), zero=True)
    assert batch["recurrent_state_h"].shape == (3, 7, 2, 2)
    assert batch["recurrent_state_c"].shape == (3, 7, 2, HIDDEN)
    stepped, _ = chain_of_steps(module, batch)
    with set_recurrent_mode(True):
        torch.testing.assert_close(module(batch.clone())["features"], stepped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_recurrent_mode_uses_the_stored_state_and_step_mode_zero(cell: str) -> None:
    module = make(cell, dtype=torch.float64)
    batch = random_batch(module, (1,))
    batch["is_init"][:] = True
    stepped = module(batch.clone())["features"]
    zeroed = batch.clone()
    for key in module.state_keys:
        zeroed[key].zero_()
    torch.testing.assert_close(stepped, module(zeroed)["features"])
    with set_recurrent_mode(True):
        replayed = module(batch.clone())["features"]
    batch["is_init"][:] = False
    torch.testing.assert_close(replayed, module(batch)["features"])


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (0,)], ids=str)
def test_step_shapes(cell: str, shape: tuple[int, ...]) -> None:
    module = make(cell, num_layers=2)
    for flags in (torch.zeros(shape, dtype=torch.bool), torch.zeros(*shape, 1, dtype=torch.bool)):
        step = TensorDict({"observation": torch.randn(*shape, INPUTS), "is_init": flags}, shape)
        keys_before = set(step.keys())
        out = module(step)
        assert out is step
        assert out["features"].shape == (*shape, HIDDEN)
        for key in module.state_keys:
            assert out["next", key].shape == (*shape, 2, HIDDEN)
            assert key not in keys_before | set(out.keys())


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", ["pad", "loop"])
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 4)], ids=str)
def test_empty_sequences(cell: str, backend: str, shape: tuple[int, ...]) -> None:
    module = make(cell, recurrent_backend=backend)
    batch = random_batch(module, shape)
    with set_recurrent_mode(True):
        assert module(batch)["features"].shape == (*shape, HIDDEN)


@pytest.mark.parametrize("cell", CELLS)
def test_states_are_dense_but_for_pad(cell: str) -> None:
    module = make(cell, recurrent_backend="loop", dtype=torch.float64)
    batch = random_batch(module, (3, 8), zero=True)
    _, after = chain_of_steps(module, batch)
    with set_recurrent_mode(True):
        out = module(batch.clone())
        padded = make_pad_twin(module)(batch.clone())
    for key in module.state_keys:
        expected = torch.stack([step["next", key] for step in after], 1)
        torch.testing.assert_close(out["next", key], expected, rtol=1e-12, atol=1e-12)
        ends = torch.cat([batch["is_init"][:, 1:], torch.ones(3, 1, dtype=torch.bool)], 1)
        torch.testing.assert_close(padded["next", key][ends], expected[ends], rtol=1e-12, atol=1e-12)
        assert (padded["next", key][~ends] == 0).all()


def make_pad_twin(module: RecurrentModule) -> RecurrentModule:
    cell = module.child_name
    twin = make(cell, recurrent_backend="pad", dtype=module.net.dtype)
    twin.load_state_dict(module.state_dict())
    return twin


@pytest.mark.parametrize("cell", CELLS)
def test_chunks_continue_a_sequence(cell: str) -> None:
    module = make(cell, recurrent_backend="pad", dtype=torch.float64)
    batch = random_batch(module, (2, 10), zero=True)
    with set_recurrent_mode(True):
        whole = module(batch.clone())["features"]
        first = module(batch[:, :6].clone())
        second = batch[:, 6:].clone()
        for key in module.state_keys:
            second[key][:, 0] = torch.where(
                second["is_init"][:, 0, None, None], second[key][:, 0], first["next", key][:, -1]
            )
        parts = torch.cat([first["features"], module(second)["features"]], 1)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cell", CELLS)
def test_trajectory_ids_cut_a_flattened_batch(cell: str) -> None:
    module = make(cell, dtype=torch.float64)
    batch = random_batch(module, (3, 6))
    batch["is_init"][:] = False
    batch["collector", "traj_ids"] = torch.arange(3).unsqueeze(1).expand(3, 6)
    with set_recurrent_mode(True):
        rows = module(batch.clone())["features"]
        flat = module(batch.reshape(-1))["features"]
        leaking = module(batch.reshape(-1).exclude(("collector", "traj_ids")))["features"]
    torch.testing.assert_close(flat, rows.reshape(18, -1))
    assert (leaking - flat).abs().max() > 1e-3


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bias": False}, {"num_layers": 2, "bidirectional": True}])
def test_state_dict_is_that_of_torch_nn(cell: str, options: dict) -> None:
    torch_module = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](INPUTS, HIDDEN, batch_first=True, **options)
    module = make(cell, **options)
    expected = {f"{cell}.{name}": tuple(value.shape) for name, value in torch_module.state_dict().items()}
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == expected
    module.load_state_dict({f"{cell}.{name}": value for name, value in torch_module.state_dict().items()})
    x = torch.randn(4, 6, INPUTS)
    is_init = torch.zeros(4, 6, dtype=torch.bool)
    with set_recurrent_mode(True):
        features = module(observation=x, is_init=is_init)[0]
    torch.testing.assert_close(features, torch_module(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cell", CELLS)
def test_a_wrapped_module_gives_its_parameters(cell: str) -> None:
    wrapped = {"lstm": nn.LSTM, "gru": nn.GRU}[cell](INPUTS, HIDDEN, 2, batch_first=True, dropout=0.25).eval()
    module = CELLS[cell](in_key="observation", out_key="features", **{cell: wrapped})
    assert {id(p) for p in module.parameters()} == {id(p) for p in wrapped.parameters()}
    assert not module.net.training
    assert module.net.dropout == 0.25
    assert not isinstance(module.net, nn.RNNBase)


@pytest.mark.parametrize("cell", CELLS)
def test_dropout_acts_between_layers_in_training_only(cell: str) -> None:
    module = make(cell, num_layers=2, dropout=0.5)
    batch = random_batch(module, (4, 8))
    for mode in (False, True):
        inputs = batch.clone() if mode else batch[:, 0].clone()
        with set_recurrent_mode(mode):
            module.train()
            first, second = module(inputs.clone())["features"], module(inputs.clone())["features"]
            assert not torch.equal(first, second)
            module.eval()
            assert torch.equal(module(inputs.clone())["features"], module(inputs.clone())["features"])


@pytest.mark.parametrize("cell", CELLS)
def test_the_named_backend_runs(cell: str) -> None:
    for backend, expected in (("pad", "pad"), ("loop", "loop"), ("reference", "reference"), ("auto", "pad")):
        module = make(cell, recurrent_backend=backend, num_layers=2)
        with record_backends() as ran, set_recurrent_mode(True):
            module(random_batch(module, (2, 3)))
        assert ran == [expected, expected]


@pytest.mark.parametrize("cell", CELLS)
def test_gradients_reach_stored_states(cell: str) -> None:
    module = make(cell, recurrent_backend="loop")
    batch = random_batch(module, (2, 6))
    for key in module.state_keys:
        batch[key].requires_grad_()
    with set_recurrent_mode(True):
        module(batch)["features"].sum().backward()
    starts = batch["is_init"].clone()
    starts[:, 0] = True
    for key in module.state_keys:
        gradient = batch[key].grad
        assert (gradient[starts] != 0).any()
        assert (gradient[~starts] == 0).all()


@pytest.mark.parametrize("cell", CELLS)
def test_keywords_and_positions(cell: str) -> None:
    module = make(cell)
    batch = random_batch(module, (4,))
    expected = [module(batch.clone()).get(key) for key in module.out_keys]
    inputs = {key: batch[key] for key in module.in_keys}
    for outputs in (module(**inputs), module(*inputs.values())):
        assert all(torch.equal(value, other) for value, other in zip(outputs, expected, strict=True))
    one = CELLS[cell](1, HIDDEN, in_key="x", out_key="y")  # value and is_init both end in 1
    assert one(x=torch.randn(4, 1), is_init=torch.zeros(4, 1, dtype=torch.bool))[0].shape == (4, HIDDEN)
    with set_recurrent_mode(True):
        assert one(x=torch.randn(4, 2, 1), is_init=torch.zeros(4, 2, 1, dtype=torch.bool))[0].shape == (4, 2, HIDDEN)


@pytest.mark.parametrize(
    ("cell", "keys", "in_keys", "out_keys"),
    [
        (
            "lstm",
            {"in_key": "x", "out_key": "y"},
            ["x", "recurrent_state_h", "recurrent_state_c", "is_init"],
            ["y", ("next", "recurrent_state_h"), ("next", "recurrent_state_c")],
        ),
        (
            "gru",
            {"in_key": "x", "out_key": "y"},
            ["x", "recurrent_state", "is_init"],
            ["y", ("next", "recurrent_state")],
        ),
        (
            "lstm",
            {"in_keys": [("a", ("x",)), "h", "c"], "out_keys": ["y", ("next", "h"), ("next", "c")]},
            [("a", "x"), "h", "c", "is_init"],
            ["y", ("next", "h"), ("next", "c")],
        ),
        (
            "gru",
            {"in_keys": ["x", "h", "is_init"], "out_keys": [("y",), ("next", "h")]},
            ["x", "h", "is_init"],
            ["y", ("next", "h")],
        ),
    ],
)
def test_keys(cell: str, keys: dict, in_keys: list, out_keys: list) -> None:
    module = CELLS[cell](INPUTS, HIDDEN, **keys)
    assert module.in_keys == in_keys
    assert module.out_keys == out_keys


def test_mode_belongs_to_code_not_to_modules() -> None:
    module = make("gru", default_recurrent_mode=True)
    assert module.recurrent_mode
    with set_recurrent_mode(False):
        assert not module.recurrent_mode
        with set_recurrent_mode(None):
            assert module.recurrent_mode
    with pytest.raises(RuntimeError, match="can't be assigned"):
        module.recurrent_mode = False
    with pytest.raises(RuntimeError, match=r"with recurl\.modules\.set_recurrent_mode"):
        module.set_recurrent_mode()


@pytest.mark.parametrize("cell", CELLS)
def test_primer(cell: str) -> None:
    module = make(cell, num_layers=2, dtype=torch.float64)
    (primer,) = get_primers_from_module(nn.Sequential(module, module))
    assert list(primer.primers.keys()) == module.state_keys
    for key in module.state_keys:
        assert primer.primers[key].shape == (2, HIDDEN)
        assert primer.primers[key].dtype == torch.float64
    other = CELLS[cell](
        HIDDEN,
        HIDDEN,
        in_keys=["features", *(f"other_{key}" for key in module.state_keys)],
        out_keys=["y", *(("next", f"other_{key}") for key in module.state_keys)],
    )
    primers = get_primers_from_module(nn.Sequential(module, other))
    assert len([key for primer in primers for key in list(primer.primers.keys())]) == 2 * len(module.state_keys)
    kinds = [type(transform).__name__ for transform in get_env_transforms_from_module(nn.Sequential(module, other))]
    assert kinds == ["InitTracker", "TensorDictPrimer", "TensorDictPrimer"]


def test_primer_of_a_state_that_is_not_fed_back() -> None:
    module = GRUModule(3, 5, in_keys=["x", "h"], out_keys=["y", "h_out"])
    with pytest.raises(RuntimeError, match=r"written to 'h_out'.*use the out key \('next', 'h'\)"):
        get_primers_from_module(module)
    with pytest.warns(UserWarning, match="No primer from a GRUModule"):
        assert get_primers_from_module(module, strict=False, warn=False) is None
    with pytest.warns(UserWarning, match="no submodule with recurrent states"):
        assert get_primers_from_module(nn.Linear(1, 1)) is None


def test_a_recurl_network_can_be_wrapped() -> None:
    net = make("gru", num_layers=2).net
    module = GRUModule(in_key="observation", out_key="features", gru=net)
    assert module.gru is net
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.LSTM, got GRU"):
        LSTMModule(in_key="observation", out_key="features", lstm=net)


def test_options_are_kept() -> None:
    module = make(
        "lstm",
        recurrent_backend="loop",
        recurrent_recompute="full",
        recurrent_matmul_precision="tf32x3",
        dropout=0.25,
        num_layers=2,
    )
    assert module.recurrent_backend == "loop"
    assert module.recurrent_recompute == "full"
    assert module.recurrent_matmul_precision == "tf32x3"
    assert module.recurrent_compute_dtype == torch.float32
    assert module.net.dropout == 0.25


@pytest.mark.parametrize("cell", CELLS)
def test_recompute_changes_only_the_saved_tensors(cell: str) -> None:
    results = []
    for recompute in ("none", "full"):
        torch.manual_seed(0)
        module = make(cell, num_layers=2, recurrent_backend="loop", recurrent_recompute=recompute)
        batch = random_batch(module, (3, 9))
        kept: list[int] = []

        def keep(tensor: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        with set_recurrent_mode(True), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = module(batch)["features"].square().sum()
        results.append((torch.autograd.grad(loss, list(module.parameters())), sum(kept)))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[1][1] < results[0][1]


@pytest.mark.parametrize("cell", CELLS)
def test_canonicalize(cell: str) -> None:
    module = make(cell)
    batch = TensorDict({"observation": torch.randn(4, 2, 3).transpose(0, 1), "other": torch.randn(4, 2).t()}, [2, 4])
    other = batch["other"]
    assert module.canonical_keys == [*module.in_keys, *module.out_keys]
    result = module.canonicalize(batch)
    assert result is not batch
    assert result["observation"].is_contiguous()
    assert not batch["observation"].is_contiguous()
    assert result["other"] is other
    assert module.canonicalize(batch, inplace=True) is batch
    assert batch["observation"].is_contiguous()
    nothing = TensorDict({"other": torch.zeros(2)}, [2])
    assert canonicalize_rnn_subset(nothing, [module]) is nothing
    both = canonicalize_rnn_subset(batch, [module, make("gru", in_key="other", input_size=4)], inplace=False)
    assert both["other"].is_contiguous()
