"""Recurrent modules whose layers are blocks: arguments, keys and states."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from recurl.envs import GymEnv, TransformedEnv
from recurl.modules import (
    CellModule,
    FFMModule,
    GatedDeltaNetModule,
    GRUModule,
    GTrXLModule,
    LRUModule,
    Mamba2Module,
    MinGRUModule,
    MinLSTMModule,
    MLSTMModule,
    RGLRUModule,
    S5Module,
    SHMModule,
    SLSTMModule,
    get_env_transforms_from_module,
    set_recurrent_mode,
)
from recurl.recurrence import CELLS, record_backends
from recurl.recurrence.cells.blocks import Block

MODULES = {
    "mingru": MinGRUModule,
    "minlstm": MinLSTMModule,
    "lru": LRUModule,
    "s5": S5Module,
    "rglru": RGLRUModule,
    "ffm": FFMModule,
    "gtrxl": GTrXLModule,
    "mlstm": MLSTMModule,
    "mamba2": Mamba2Module,
    "gated_deltanet": GatedDeltaNetModule,
    "slstm": SLSTMModule,
    "shm": SHMModule,
}
KEYS = {"in_key": "observation", "out_key": "features"}


def test_every_block_has_a_module() -> None:
    assert list(MODULES) == [name for name, cell in CELLS.items() if isinstance(cell, Block)]


@pytest.mark.parametrize("name", MODULES)
def test_the_module_is_that_of_the_cell(name: str) -> None:
    module, other = MODULES[name](3, 8, 2, **KEYS), CellModule(CELLS[name], 3, 8, 2, **KEYS)
    assert module.net.cell == CELLS[name]
    assert (module.in_keys, module.out_keys) == (other.in_keys, other.out_keys)
    other.load_state_dict(module.state_dict())
    assert {key.partition(".")[0] for key in module.state_dict()} == {name}
    batch = TensorDict({"observation": torch.randn(2, 5, 3), "is_init": torch.rand(2, 5) < 0.3}, [2, 5])
    with set_recurrent_mode(True), record_backends() as ran:
        torch.testing.assert_close(module(batch.clone())["features"], other(batch.clone())["features"])
    assert ran == ["loop"] * 4


@pytest.mark.parametrize("name", MODULES)
def test_the_words_are_those_of_the_lstm(name: str) -> None:
    options = {"bias": False, "dropout": 0.2, "bidirectional": True, "recurrent_backend": "scan"}
    options |= {"recurrent_recompute": "full", "default_recurrent_mode": True, "dtype": torch.float64}
    module = MODULES[name](3, 8, 2, **options, **KEYS)
    batch = TensorDict({"observation": torch.randn(4, 3).double(), "is_init": torch.zeros(4, 1, dtype=torch.bool)}, [4])
    module(batch)["features"].sum().backward()
    assert batch["features"].shape == (4, 16)
    assert all(parameter.grad is not None for parameter in module.parameters())
    in_keys = ["x", *(f"s{k}" for k in range(len(CELLS[name].state_names)))]
    out_keys = ["y", *(("next", key) for key in in_keys[1:])]
    assert MODULES[name](3, 8, in_keys=in_keys, out_keys=out_keys).in_keys == [*in_keys, "is_init"]


@pytest.mark.parametrize("name", MODULES)
def test_deep_stacks_learn(name: str) -> None:
    """Eight layers preserve the scale of features, and gradients reach the first layer.

    Of GTrXL's, each passes 0.77 of its input at first, by its two gates.
    """
    torch.manual_seed(0)
    module = MODULES[name](16, 16, 8, recurrent_backend="scan", default_recurrent_mode=True, **KEYS)
    batch = TensorDict(
        {"observation": torch.randn(4, 64, 16), "is_init": torch.zeros(4, 64, dtype=torch.bool)}, [4, 64]
    )
    features = module(batch)["features"]
    assert (0.1 if name == "gtrxl" else 0.3) < features.std() < 10
    features.square().mean().backward()
    sizes = {
        layer: [p.grad.norm() for n, p in module.named_parameters() if n.endswith(f"_l{layer}")] for layer in (0, 7)
    }
    assert 0.01 < max(sizes[0]) / max(sizes[7]) < 100


def test_names_and_shapes_of_states() -> None:
    module = RGLRUModule(3, 8, 2, state_size=6, conv_width=4, **KEYS)
    primers = module.make_tensordict_primer().primers
    assert {key: tuple(primers[key].shape) for key in module.state_keys} == {
        "recurrent_state_h": (2, 6),
        "recurrent_state_window": (2, 3, 6),
    }
    assert FFMModule(3, 8, memory_size=5, context_size=2, **KEYS).net.state_shapes == ((5, 2, 2),)
    assert S5Module(3, 7, **KEYS).net.state_shapes == ((4, 2),)


@pytest.mark.parametrize("name", MODULES)
def test_environments_carry_the_states(name: str) -> None:
    module = MODULES[name](4, 8, **KEYS)
    env = TransformedEnv(GymEnv("CartPole-v1", num_envs=2), get_env_transforms_from_module(module))
    rollout = env.rollout(5, lambda step: env.rand_action(module(step)), break_when_any_done=False)
    with set_recurrent_mode(True):
        torch.testing.assert_close(module(rollout.clone())["features"], rollout["features"])


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: MinGRUModule(3, 8, proj_size=4, **KEYS),
            ArgumentError,
            "mingru has no projection: proj_size must be 0",
        ),
        (lambda: S5Module(3, 8, batch_first=False, **KEYS), ArgumentError, "batch_first must be True: S5Module keeps"),
        (lambda: LRUModule(3, 8, recurrent_backend="pad", **KEYS), UnsupportedError, "kernels for lstm and gru only"),
        (lambda: LRUModule(3, 8, recurrent_backend="nope", **KEYS), ArgumentError, "recurrent_backend must be one of"),
        (
            lambda: FFMModule(3, 4, dtype=torch.int64, **KEYS),
            ArgumentError,
            "dtype must be a real floating-point dtype",
        ),
        (lambda: FFMModule(3, 0, **KEYS), ArgumentError, "hidden_size must be at least 1, got 0"),
        (lambda: FFMModule(3, 8, in_key="x", out_keys="y"), ArgumentTypeError, "must be a list of keys"),
        (lambda: GRUModule(3, 8, conv_width=2, **KEYS), TypeError, "conv_width"),
    ],
)
def test_invalid_arguments(build, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_a_bidirectional_module_does_not_step() -> None:
    module = MinGRUModule(3, 8, bidirectional=True, **KEYS)
    step = TensorDict({"observation": torch.randn(2, 3), "is_init": torch.zeros(2, 1, dtype=torch.bool)}, [2])
    with pytest.raises(RuntimeError, match="A bidirectional module can't run step by step"):
        module(step)
