"""Contract of recurrent modules, for built-in and user-defined cells."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.modules import CellModule, GRUModule, LSTMModule, set_recurrent_mode
from recurl.recurrence import CELLS, Cell, record_backends
from recurl.sequences.index import SequenceIndex
from tests.own_cells import OWN, VARIANTS, FastWeights, MinGRU

KNOWN: dict[str, Cell] = CELLS | OWN | VARIANTS
UNGATED = [name for name in KNOWN if name not in ("lstm", "gru")]  # tested separately
INPUTS, HIDDEN = 3, 5
# Compiled less often.
COMPILED = [("own_mingru", "scan", 2), ("fastweights", "loop", 2), ("lru", "scan", 1), ("rglru", "cpu", 1)]
# torch's tracing of an autograd.Function warns.
quiet = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def make(cell: str, backend: str = "auto", **options: object) -> CellModule:
    torch.manual_seed(0)
    options = {"num_layers": 2, "dtype": torch.float64, **options}
    return CellModule(
        KNOWN[cell], INPUTS, HIDDEN, in_key="observation", out_key="features", recurrent_backend=backend, **options
    )


def per_token(flags: Tensor, like: Tensor) -> Tensor:
    return flags.reshape(*flags.shape, *(1,) * (like.ndim - flags.ndim))


def random_batch(module: CellModule, shape: tuple[int, ...]) -> TensorDict:
    """Return random values, states and resets; states stored at resets are zero, as from a primer."""
    net, is_init = module.net, torch.rand(shape) < 0.3
    batch = TensorDict({"observation": torch.randn(*shape, INPUTS, dtype=net.dtype), "is_init": is_init}, shape)
    for key, state_shape in zip(module.state_keys, net.state_shapes, strict=True):
        state = torch.randn(*shape, net.num_layers * net.num_directions, *state_shape, dtype=net.dtype)
        batch.set(key, torch.where(per_token(is_init, state), 0, state))
    return batch


def outputs(module: CellModule, batch: TensorDict, run=None) -> list[Tensor]:
    """Return all outputs, and the gradients of the parameters and of the stored states."""
    batch = batch.clone()
    stored = [batch[key].requires_grad_() for key in module.state_keys]
    with set_recurrent_mode(True):
        result = (module if run is None else run)(batch)
    written = [result[key] for key in module.out_keys]
    total = sum(value.sin().sum() for value in written)
    return [*written, *torch.autograd.grad(total, [*module.parameters(), *stored])]


@pytest.mark.parametrize("shape", [(9,), (1,), (3, 5), (2, 2, 1)], ids=str)
@pytest.mark.parametrize("backend", ["reference", "loop", "scan"])
@pytest.mark.parametrize("cell", KNOWN)
def test_steps_equal_one_recurrent_pass(cell: str, backend: str, shape: tuple[int, ...]) -> None:
    module = make(cell, backend)
    batch = random_batch(module, shape)
    with set_recurrent_mode(True), record_backends() as ran:
        replayed = module(batch.clone())
    assert set(ran) == {backend}
    index, carried = SequenceIndex.of(batch), None
    for t in range(shape[-1]):
        step = batch[..., t].clone()
        for key in module.state_keys if carried is not None else ():
            step.set(key, torch.where(per_token(step["is_init"], step[key]), step[key], carried["next", key]))
        carried = module(step)
        inside = ~index.ends.reshape(shape)[..., t]
        for key, name in zip(module.out_keys, (None, *module.net.cell.state_names), strict=True):
            expected = carried[key]
            if name in module.net.cell.states_at_ends:
                expected = expected.masked_fill(per_token(inside.unsqueeze(-1), expected), 0)
            torch.testing.assert_close(replayed[..., t][key], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"recurrent_recompute": "full"}], ids=str)
@pytest.mark.parametrize("backend", ["loop", "scan"])
@pytest.mark.parametrize("cell", KNOWN)
def test_outputs_and_gradients_are_the_reference_s(cell: str, backend: str, options: dict) -> None:
    module = make(cell, backend, **options)
    exact = make(cell, "reference", bidirectional=module.net.bidirectional)
    batch = random_batch(module, (3, 6))
    for found, expected in zip(outputs(module, batch), outputs(exact, batch), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["loop", "scan"])
@pytest.mark.parametrize("cell", UNGATED)
def test_empty_sequences(cell: str, backend: str) -> None:
    module = make(cell, backend)
    for shape in ((0,), (2, 0), (0, 3)):
        found = outputs(module, random_batch(module, shape))
        assert [value.shape[: len(shape)] for value in found[: len(module.out_keys)]] == [shape] * len(module.out_keys)
        assert all((value == 0).all() for value in found[len(module.out_keys) :])


@pytest.mark.parametrize("backend", ["loop", "scan"])
@pytest.mark.parametrize("cell", KNOWN)
def test_shapes_on_meta(cell: str, backend: str) -> None:
    module = make(cell, backend)
    batch = random_batch(module, (2, 4))
    with set_recurrent_mode(True):
        expected, found = module(batch.clone()), copy.deepcopy(module).to("meta")(batch.to("meta"))
    for key in module.out_keys:
        assert (found[key].shape, found[key].device.type) == (expected[key].shape, "meta")


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    ("cell", "backend", "layers"),  # each backend and each custom cell, with one layer or two
    [
        ("own_mingru", "scan", 1),
        ("mingru with a window", "loop", 1),
        *(pytest.param(*case, marks=pytest.mark.full) for case in COMPILED),
    ],
)
def test_compiles_as_one_graph(cell: str, backend: str, layers: int) -> None:
    torch._dynamo.reset()
    module = make(cell, backend, num_layers=layers)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 5), (2, 7)):
        batch = random_batch(module, shape)
        for found, expected in zip(outputs(module, batch, compiled), outputs(module, batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        if layers == 1:
            continue
        with torch.no_grad(), set_recurrent_mode(True):
            found, expected = compiled(batch.clone()), module(batch.clone())
        torch.testing.assert_close([found[key] for key in module.out_keys], [expected[key] for key in module.out_keys])


@pytest.mark.slow
@quiet
@pytest.mark.parametrize(
    "cell", [*OWN, "ffm", *(pytest.param(name, marks=pytest.mark.full) for name in ("rglru with a window", "s5"))]
)
def test_compiled_steps(cell: str) -> None:
    torch._dynamo.reset()
    module = make(cell)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    batch = random_batch(module, (4,))
    found, expected = compiled(batch.clone()), module(batch.clone())
    for key in module.out_keys:
        torch.testing.assert_close(found[key], expected[key])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("cell", UNGATED)
def test_exports(cell: str, mode: bool) -> None:
    module = make(cell)
    batch = random_batch(module, (2, 4))
    inputs = tuple(batch[key] for key in module.in_keys)
    with set_recurrent_mode(mode):
        program = torch.export.export(module, inputs)
        expected = module(*inputs)
    torch.testing.assert_close(program.module()(*inputs), expected)


@pytest.mark.parametrize("backend", ["loop", "scan"])
@pytest.mark.parametrize("cell", UNGATED)
def test_ensembles_and_gradients_per_member(cell: str, backend: str) -> None:
    modules = [make(cell, backend) for _ in range(2)]
    modules[1].net.reset_parameters()
    batch = random_batch(modules[0], (2, 4))
    inputs = [batch[key] for key in modules[0].in_keys]
    parameters, buffers = stack_module_state(modules)

    def loss(member: dict[str, Tensor]) -> Tensor:
        return functional_call(modules[0], (member, buffers), tuple(inputs))[0].square().sum()

    with set_recurrent_mode(True):
        gradients = vmap(grad(loss))(parameters)
        for index, module in enumerate(modules):
            module(*inputs)[0].square().sum().backward()
            for key, parameter in module.named_parameters():
                torch.testing.assert_close(gradients[key][index], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_independent(copied) -> None:
    module = CellModule(FastWeights(keys=2), 3, 5, in_key="observation", out_key="features", dtype=torch.float64)
    batch = random_batch(module, (4,))
    expected = module(batch.clone())["features"]
    other = copied(module)
    torch.testing.assert_close(other(batch.clone())["features"], expected)
    other.net.reset_parameters()
    torch.testing.assert_close(module(batch.clone())["features"], expected)
    assert other.net.cell.name == module.net.cell.name


@pytest.mark.parametrize(("cell", "kind"), [("lstm", LSTMModule), ("gru", GRUModule)])
def test_built_in_cells_are_their_modules(cell: str, kind: type) -> None:
    """Keys, parameters and results agree, so state dicts are interchangeable."""
    module = make(cell)
    other = kind(INPUTS, HIDDEN, 2, in_key="observation", out_key="features", dtype=torch.float64)
    other.load_state_dict(module.state_dict())
    assert (other.in_keys, other.out_keys) == (module.in_keys, module.out_keys)
    batch = random_batch(module, (3, 4))
    torch.testing.assert_close(outputs(other, batch), outputs(module, batch))


def test_parameters_and_states_are_named_by_the_cell() -> None:
    module = make("fastweights", num_layers=1, bidirectional=True)
    assert module.in_keys == ["observation", "recurrent_state_memory", "recurrent_state_count", "is_init"]
    assert list(module.state_dict()) == [
        f"cell.{name}_l0{suffix}" for suffix in ("", "_reverse") for name in ("key", "query", "value")
    ]
    primers = make("fastweights").make_tensordict_primer().primers
    assert primers["recurrent_state_memory"].shape == (2, 3, HIDDEN)
    assert primers["recurrent_state_count"].shape == (2,)


class Misnamed(MinGRU):
    def parameters(self, sizes):
        return {"weight": (sizes.hidden_size, sizes.input_size)}


@pytest.mark.parametrize(
    ("cell", "options", "error", "message"),
    [
        (
            MinGRU,
            {"proj_size": 2},
            ArgumentError,
            "examples.mingru:MinGRU has no projection: proj_size must be 0, got 2",
        ),
        (FastWeights, {"bias": False}, ArgumentError, "has no biases to omit: bias must be True"),
        (MinGRU, {"batch_first": False}, ArgumentError, "batch_first must be True: CellModule keeps time"),
        (
            MinGRU,
            {"recurrent_backend": "cpu"},
            UnsupportedError,
            "'cpu' can't run this module: it has kernels for lstm",
        ),
        (MinGRU, {"recurrent_backend": "pad"}, UnsupportedError, "'pad' can't run this module"),
        (
            Misnamed,
            {},
            ArgumentError,
            r"parameters\(\) must give shapes for the arguments of step\(\).*weight_z.*got weight",
        ),
        (torch.nn.GRU, {}, ArgumentTypeError, "A cell must be a subclass of recurl.recurrence.Cell"),
    ],
)
def test_invalid_arguments(cell: type, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CellModule(cell, 3, 5, in_key="x", out_key="y", **options)
