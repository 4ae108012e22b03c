"""Cells that are blocks, compared with the formulas of their papers evaluated one number at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, ArgumentTypeError
from recurl.modules import S5Module
from recurl.nn import CellNet
from recurl.recurrence import (
    BACKENDS,
    CELLS,
    ONE_STEP,
    Boundaries,
    Cell,
    FFMCell,
    GatedDeltaNetCell,
    GTrXLCell,
    LayerCall,
    LRUCell,
    Mamba2Cell,
    MinGRUCell,
    MinLSTMCell,
    MLSTMCell,
    RGLRUCell,
    S5Cell,
    SHMCell,
    Sizes,
    SLSTMCell,
    Support,
    load_cell,
)
from recurl.recurrence.cells.s5 import hippo
from recurl.recurrence.segments import Segments

INPUTS, HIDDEN, TOKENS = 3, 4, 6
SIZES = Sizes(INPUTS, HIDDEN)
Weights = dict[str, np.ndarray]


def parameters(cell: Cell, sizes: Sizes = SIZES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = cell.parameters(sizes)
    return {name: 0.6 * torch.randn(shapes[name], generator=generator, dtype=torch.float64) for name in shapes}


erf = np.vectorize(math.erf)


def expit(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + erf(x / math.sqrt(2))) / 2


def fast_gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2) + 1e-6) * scale


def layer_norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


def complex_rows(weight: np.ndarray) -> np.ndarray:
    return weight[0::2] + 1j * weight[1::2]


def convolved(w: Weights, window: list[np.ndarray]) -> np.ndarray:
    return sum(w["weight_conv"][-lag] * window[-lag] for lag in range(1, 4)) + w["bias_conv"]


def minimal(coefficients: Callable[..., tuple[np.ndarray, np.ndarray]], gates: int) -> Callable[..., np.ndarray]:
    def run(w: Weights, inputs: np.ndarray) -> np.ndarray:
        h, window, features = np.zeros(5), [np.zeros(HIDDEN)] * 2, []
        for x in inputs:
            u = w["weight_in"] @ x + w["bias_in"]
            window.append(u)
            u = u + convolved(w, window)
            a, b = coefficients(*np.split(w["weight_gates"] @ rms(u, w["scale_gates"]) + w["bias_gates"], gates))
            h = a * h + b
            u = u + w["weight_out"] @ h + w["bias_out"]
            up = gelu(w["weight_up"] @ rms(u, w["scale_up"]) + w["bias_up"])
            features.append(u + w["weight_down"] @ up + w["bias_down"])
        return np.stack(features)

    return run


def mingru(update: np.ndarray, candidate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    z = expit(update)
    return 1 - z, z * candidate


def minlstm(forget: np.ndarray, enter: np.ndarray, candidate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    f, i = expit(forget), expit(enter)
    return f / (f + i), i / (f + i) * candidate


def state_space(
    dynamics: Callable[[Weights], tuple[np.ndarray, np.ndarray]], times: float
) -> Callable[[Weights, np.ndarray], np.ndarray]:
    def run(w: Weights, inputs: np.ndarray) -> np.ndarray:
        a, b = dynamics(w)
        c = np.conj(complex_rows(w["weight_c"].T)).T
        h, features = np.zeros_like(a), []
        for x in inputs:
            skip = w["weight_in"] @ x + w["bias_in"]
            u = layer_norm(skip) * w["scale_norm"] + w["bias_norm"]
            h = a * h + b @ u
            y = fast_gelu(times * (c @ h).real + w["skip"] * u)
            value, gate = np.split(w["weight_glu"] @ y + w["bias_glu"], 2)
            features.append(skip + value * expit(gate))
        return np.stack(features)

    return run


def lru(w: Weights) -> tuple[np.ndarray, np.ndarray]:
    a = np.exp(-np.exp(w["nu_log"]) + 1j * np.exp(w["theta_log"]))
    return a, np.exp(w["gamma_log"])[:, None] * complex_rows(w["weight_b"])


def s5(w: Weights) -> tuple[np.ndarray, np.ndarray]:
    poles, dt = np.minimum(w["lambda_re"], -1e-4) + 1j * w["lambda_im"], np.exp(w["step_log"])
    a = np.exp(poles * dt)
    return a, ((a - 1) / poles)[:, None] * complex_rows(w["weight_b"])


def rglru(w: Weights, inputs: np.ndarray) -> np.ndarray:
    h, window, features = np.zeros(6), [np.zeros(6)] * 2, []
    for x in inputs:
        u = w["weight_in"] @ x + w["bias_in"]
        gate, inner = np.split(w["weight_branches"] @ rms(u, w["scale_branches"]) + w["bias_branches"], 2)
        window.append(inner)
        inner = convolved(w, window)
        heads = [np.split(w["weight_gates"][k] @ inner[3 * k : 3 * k + 3] + w["bias_gates"][k], 2) for k in range(2)]
        r, i = (expit(np.concatenate([head[part] for head in heads])) for part in range(2))
        a = np.exp(-8 * np.log1p(np.exp(w["decay"])) * r)
        h = a * h + np.sqrt(1 - a**2) * i * inner
        u = u + w["weight_out"] @ (h * fast_gelu(gate)) + w["bias_out"]
        opening, value = np.split(w["weight_up"] @ rms(u, w["scale_up"]) + w["bias_up"], 2)
        features.append(u + w["weight_down"] @ (fast_gelu(opening) * value) + w["bias_down"])
    return np.stack(features)


def ffm(w: Weights, inputs: np.ndarray) -> np.ndarray:
    memory = len(w["alpha"])
    gamma = np.exp(-np.abs(w["alpha"])[:, None] + 1j * w["omega"])
    h, features = np.zeros_like(gamma), []
    for x in inputs:
        pre = w["weight_in"] @ x + w["bias_in"]
        y, through, enter, leave = np.split(pre, [memory, memory + HIDDEN, 2 * memory + HIDDEN])
        h = gamma * h + (y * expit(enter))[:, None]
        pairs = np.stack([h.real, h.imag], -1).reshape(-1)
        o = expit(leave)
        features.append(layer_norm(w["weight_mix"] @ pairs + w["bias_mix"]) * o + through * (1 - o))
    return np.stack(features)


def gtrxl(w: Weights, inputs: np.ndarray) -> np.ndarray:
    heads, past, size = 2, 3, HIDDEN // 2
    frequencies = [10_000 ** (-2 * i / HIDDEN) for i in range(HIDDEN // 2)]
    distances = [np.array([f(p * r) for f in (np.sin, np.cos) for r in frequencies]) for p in range(past + 1)]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x) * w[f"scale_{name}"] + w[f"bias_{name}"]

    def gate(x: np.ndarray, y: np.ndarray, name: str) -> np.ndarray:
        w_r, w_z, w_g = np.split(w[f"weight_{name}_y"], 3)
        u_r, u_z = np.split(w[f"weight_{name}_x"], 2)
        r, z = expit(w_r @ y + u_r @ x), expit(w_z @ y + u_z @ x - w[f"gate_{name}"])
        return (1 - z) * x + z * np.tanh(w_g @ y + w[f"weight_{name}_reset"] @ (r * x))

    memory, features = [], []
    for x in inputs:
        u = w["weight_in"] @ x + w["bias_in"]
        memory.append(u)
        query, found = w["weight_query"] @ norm(u, "attention"), []
        for head in range(heads):
            of = slice(head * size, (head + 1) * size)
            scores, values = [], []
            for distance, m in enumerate(reversed(memory[-past - 1 :])):
                m = norm(m, "attention")
                content = (query + w["bias_content"])[of] @ (w["weight_key"] @ m)[of]
                position = (query + w["bias_position"])[of] @ (w["weight_position"] @ distances[distance])[of]
                scores.append((content + position) / math.sqrt(size))
                values.append((w["weight_value"] @ m)[of])
            weights = np.exp(scores) / np.sum(np.exp(scores))
            found.append(weights @ np.stack(values))
        y = gate(u, np.maximum(w["weight_out"] @ np.concatenate(found), 0), "attention")
        up = np.maximum(w["weight_up"] @ norm(y, "feed_forward") + w["bias_up"], 0)
        features.append(gate(y, np.maximum(w["weight_down"] @ up + w["bias_down"], 0), "feed_forward"))
    return np.stack(features)


def silu(x: np.ndarray) -> np.ndarray:
    return x * expit(x)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


def of_head(x: np.ndarray, head: int, heads: int = 2) -> np.ndarray:
    return np.split(x, heads)[head]


def gated_deltanet(w: Weights, inputs: np.ndarray) -> np.ndarray:
    heads, key, value = 2, 3, 2
    memory = np.zeros((heads, value, key))  # as in the paper, values by keys
    window, features = [np.zeros(heads * (2 * key + value))] * 2, []
    for x in inputs:
        x = w["weight_in"] @ x + w["bias_in"]
        u = rms(x, w["scale_norm"])
        inner, z = np.split(w["weight_branches"] @ u, [heads * (2 * key + value)])
        window.append(inner)
        q, k, v = np.split(silu(convolved(w, window)), [heads * key, 2 * heads * key])
        b, d = np.split(w["weight_gates"] @ u, 2)
        a, b = np.exp(-np.exp(w["decay"]) * np.log1p(np.exp(d + w["step_offset"]))), expit(b)
        read = []
        for n in range(heads):
            kn, qn = unit(of_head(k, n)), unit(of_head(q, n))
            memory[n] = a[n] * memory[n] @ (np.eye(key) - b[n] * np.outer(kn, kn)) + b[n] * np.outer(of_head(v, n), kn)
            read.append(rms(memory[n] @ qn / math.sqrt(key), w["scale_heads"]))
        x = x + w["weight_out"] @ (np.concatenate(read) * silu(z)) + w["bias_out"]
        gate, up = np.split(w["weight_up"] @ rms(x, w["scale_up"]) + w["bias_up"], 2)
        features.append(x + w["weight_down"] @ (silu(gate) * up) + w["bias_down"])
    return np.stack(features)


def mamba2(w: Weights, inputs: np.ndarray) -> np.ndarray:
    heads, size = 2, 3
    width = 2 * HIDDEN
    memory = np.zeros((heads, width // heads, size))
    window, features = [np.zeros(width + 2 * size)] * 2, []
    for u in inputs:
        u = w["weight_in"] @ u + w["bias_in"]
        z, inner, d = np.split(w["weight_branches"] @ rms(u, w["scale_norm"]), [width, 2 * width + 2 * size])
        window.append(inner)
        x, b, c = np.split(silu(convolved(w, window)), [width, width + size])
        d = np.log1p(np.exp(d + w["step_offset"]))
        read = []
        for n in range(heads):
            xn = of_head(x, n)
            memory[n] = np.exp(-np.exp(w["decay"][n]) * d[n]) * memory[n] + d[n] * np.outer(xn, b)
            read.append(memory[n] @ c + w["skip"][n] * xn)
        features.append(u + w["weight_out"] @ rms(np.concatenate(read) * silu(z), w["scale_out"]) + w["bias_out"])
    return np.stack(features)


def mlstm(w: Weights, inputs: np.ndarray) -> np.ndarray:
    """The paper's equations without stabilization."""
    heads, size = 2, HIDDEN
    memory, normalizer = np.zeros((heads, size, size)), np.zeros((heads, size))
    window, features = [np.zeros(heads * size)] * 2, []
    for x in inputs:
        x = w["weight_in"] @ x + w["bias_in"]
        inner, z = np.split(w["weight_branches"] @ (layer_norm(x) * w["scale_norm"]) + w["bias_branches"], 2)
        window.append(inner)
        mixed = silu(convolved(w, window))
        q, k, v = (
            np.concatenate([w[f"weight_{name}"][n] @ of_head(part, n) for n in range(heads)])
            for name, part in (("query", mixed), ("key", mixed), ("value", inner))
        )
        enter, forget = np.split(w["weight_gates"] @ np.concatenate([q, k, v]), 2)
        enter, forget = np.exp(enter + w["gates_input"]), expit(forget + w["gates_forget"])
        read = []
        for n in range(heads):
            kn, qn, vn = of_head(k, n) / math.sqrt(size), of_head(q, n), of_head(v, n)
            memory[n] = forget[n] * memory[n] + enter[n] * np.outer(vn, kn)
            normalizer[n] = forget[n] * normalizer[n] + enter[n] * kn
            read.append(layer_norm(memory[n] @ qn / max(abs(normalizer[n] @ qn), 1)))
        read = np.concatenate(read) * w["scale_heads"] + w["skip"] * mixed
        features.append(x + w["weight_out"] @ (read * silu(z)) + w["bias_out"])
    return np.stack(features)


def slstm(exponential: bool) -> Callable[[Weights, np.ndarray], np.ndarray]:
    """The paper's recurrence without its stabilizer: c and n are sums of products of gates."""

    def run(w: Weights, inputs: np.ndarray) -> np.ndarray:
        heads, size = 2, HIDDEN // 2
        h, c, n, features = np.zeros(HIDDEN), np.zeros(HIDDEN), np.zeros(HIDDEN), []
        window = [np.zeros(HIDDEN)] * 2
        for x in inputs:
            u = w["weight_in"] @ x + w["bias_in"]
            normed = layer_norm(u) * w["scale_gates"]
            window.append(normed)
            seen = convolved(w, window)
            seen = seen * expit(seen)
            before, read = h.copy(), np.zeros(HIDDEN)
            for k in range(heads):
                of = slice(k * size, (k + 1) * size)
                from_h = w["weight_hidden"][k] @ before[of] + w["bias_gates"][k]
                from_x = np.concatenate([w["weight_gates"][k] @ seen[of], w["weight_cell"][k] @ normed[of]])
                i, f, z, o = np.split(from_x + from_h, 4)
                forget = np.exp(f) if exponential else expit(f)
                c[of] = forget * c[of] + np.exp(i) * np.tanh(z)
                n[of] = forget * n[of] + np.exp(i)
                h[of] = expit(o) * c[of] / n[of]
                read[of] = layer_norm(h[of])
            u = u + read * w["scale_hidden"]
            gate, value = np.split(w["weight_up"] @ (layer_norm(u) * w["scale_up"]), 2)
            features.append(u + w["weight_down"] @ (gelu(gate) * value))
        return np.stack(features)

    return run


def shm(w: Weights, inputs: np.ndarray) -> np.ndarray:
    size, features = 3, []
    memory = np.zeros((size, size))
    for t, x in enumerate(inputs):
        u = layer_norm(np.maximum(w["weight_in"] @ x + w["bias_in"], 0)) * w["scale_norm"] + w["bias_norm"]
        key, query, value, change, strength = np.split(w["weight_memory"] @ u, [3, 6, 9, 12])
        key, query = (np.maximum(part, 0) / (np.maximum(part, 0).sum() + 1e-5) for part in (key, query))
        theta = w["theta"][(t + 1) % 4]
        for i in range(size):
            for j in range(size):
                memory[i, j] *= 1 + np.tanh(theta[i] * change[j])
                memory[i, j] += expit(strength[0]) * value[i] * key[j]
        read = memory @ query + w["weight_shortcut"] @ u + w["bias_shortcut"]
        features.append(np.maximum(w["weight_out"] @ read + w["bias_out"], 0))
    return np.stack(features)


PAPERS: dict[str, tuple[Cell, Callable[[Weights, np.ndarray], np.ndarray]]] = {
    "mingru": (MinGRUCell(state_size=5, conv_width=3), minimal(mingru, 2)),
    "minlstm": (MinLSTMCell(state_size=5, conv_width=3), minimal(minlstm, 3)),
    "lru": (LRUCell(state_size=5), state_space(lru, 1)),
    "s5": (S5Cell(state_size=6), state_space(s5, 2)),
    "rglru": (RGLRUCell(state_size=6, heads=2, conv_width=3), rglru),
    "ffm": (FFMCell(memory_size=3, context_size=2), ffm),
    "gtrxl": (GTrXLCell(window=3, heads=2), gtrxl),
    "mlstm": (MLSTMCell(heads=2, conv_width=3), mlstm),
    "mamba2": (Mamba2Cell(heads=2, state_size=3, conv_width=3), mamba2),
    "gated_deltanet": (GatedDeltaNetCell(heads=2, key_size=3, value_size=2, conv_width=3), gated_deltanet),
    "slstm": (SLSTMCell(heads=2, conv_width=3), slstm(exponential=False)),
    "slstm(exponential_forget=True)": (SLSTMCell(2, 3, exponential_forget=True), slstm(exponential=True)),
    "shm": (SHMCell(memory_size=3, rows=4), shm),
}


@pytest.mark.parametrize("backend", ["reference", "loop", "scan"])
@pytest.mark.parametrize("name", PAPERS)
def test_features_are_the_paper_s(name: str, backend: str) -> None:
    cell, paper = PAPERS[name]
    weights = parameters(cell)
    x = torch.randn(TOKENS, INPUTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    states = tuple(x.new_zeros(TOKENS, *shape) for shape in cell.state_shapes(SIZES))
    packed = cell.pack([weights.get(parameter) for parameter in cell.parameter_names])
    boundaries = Boundaries.from_is_init(torch.zeros(TOKENS, dtype=torch.bool))
    chosen = BACKENDS.choose(backend, Support(cell, x.device, x.dtype))
    features, _ = chosen.run(LayerCall(cell, packed, x, states, boundaries))
    expected = paper({key: value.numpy() for key, value in weights.items()}, x.numpy())
    assert np.linalg.norm(features.numpy() - expected) <= 1e-12 * np.linalg.norm(expected)


def filled(cell: Cell, sizes: Sizes = SIZES) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {name: torch.full(shape, torch.nan) for name, shape in cell.parameters(sizes).items()}
    cell.initialize_layer(made, sizes)
    assert all(value.isfinite().all() for value in made.values())
    return made


@pytest.mark.parametrize("name", PAPERS)
def test_every_parameter_is_filled(name: str) -> None:
    """Initial values keep the features in scale over 300 steps of noise."""
    sizes = Sizes(16, 16)
    cell = load_cell(name)
    made = filled(cell, sizes)
    x = torch.randn(300, 16)
    states = tuple(x.new_zeros(300, *shape) for shape in cell.state_shapes(sizes))
    packed = cell.pack([made.get(parameter) for parameter in cell.parameter_names])
    boundaries = Boundaries.from_is_init(torch.zeros(300, dtype=torch.bool))
    features, _ = BACKENDS.choose("scan", Support(cell, x.device)).run(LayerCall(cell, packed, x, states, boundaries))
    assert 0.1 < features[100:].std() < 10


def test_first_values_of_lru() -> None:
    made = filled(LRUCell(state_size=4096, min_radius=0.5, max_radius=0.9, max_phase=1.0))
    radius = torch.exp(-made["nu_log"].exp())
    assert 0.5 <= radius.min() < 0.51
    assert 0.89 < radius.max() <= 0.9
    area = (radius**2 - 0.25) / (0.81 - 0.25)
    assert abs(area.mean() - 0.5) < 0.02
    assert made["theta_log"].exp().max() <= 1.0
    torch.testing.assert_close(made["gamma_log"].exp(), (1 - radius**2).sqrt())


def test_first_values_of_s5_are_hippo_s() -> None:
    """The poles are half of the matrix's eigenvalues, and its eigenvectors are orthonormal."""
    size = 16
    values, vectors = hippo(size)
    n = np.arange(size)
    legs = -np.where(
        n[:, None] > n, np.sqrt(np.outer(2 * n + 1, 2 * n + 1)), np.where(n[:, None] == n, n[:, None] + 1, 0)
    )
    normal = legs + np.sqrt(np.outer(n + 0.5, n + 0.5))
    np.testing.assert_allclose(normal @ vectors.numpy(), vectors.numpy() * values.numpy(), atol=1e-10)
    assert (values.imag < 0).all()
    torch.testing.assert_close(vectors.mH @ vectors, torch.eye(size // 2, dtype=vectors.dtype))
    made = filled(S5Cell(state_size=size))
    torch.testing.assert_close(made["lambda_im"].double(), values.imag, rtol=1e-5, atol=1e-5)
    assert math.log(0.001) <= made["step_log"].min() <= made["step_log"].max() <= math.log(0.1)


def test_first_values_of_rglru_and_ffm() -> None:
    made = filled(RGLRUCell(state_size=1000, conv_width=4))
    radius = torch.exp(-torch.nn.functional.softplus(made["decay"]))
    assert radius.min() >= 0.9
    assert radius.max() <= 0.999 + 1e-6
    made = filled(FFMCell())
    assert made["alpha"].min().item() == pytest.approx(-math.log(0.01) / 1024)
    assert (2 * math.pi / made["omega"]).tolist() == pytest.approx([1, 342, 683, 1024])


def test_the_root_of_rglru_has_a_bounded_slope() -> None:
    """With a closed gate, a is 1 and the slope of sqrt(1 - a^2) is infinite."""
    cell, sizes = RGLRUCell(), Sizes(HIDDEN, HIDDEN)
    weights = {name: value.float().requires_grad_() for name, value in parameters(cell, sizes).items()}
    with torch.no_grad():
        weights["bias_gates"].fill_(-200.0)
    packed = cell.pack([weights.get(parameter) for parameter in cell.parameter_names])
    features, _ = cell.step(torch.randn(3, HIDDEN), (torch.randn(3, HIDDEN),), *packed)
    gradients = torch.autograd.grad(features.sum(), list(weights.values()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", ["step_log", "lambda_im"])
def test_the_slowest_modes_of_s5_have_finite_derivatives(name: str) -> None:
    """The quotient (exp(z) - 1) / z isn't selected for z near 0, but must not be NaN either."""
    torch.manual_seed(0)
    module = S5Module(INPUTS, HIDDEN, in_key="x", out_key="y")
    with torch.no_grad():
        module.net.step_log_l0.fill_(-60)
        module.net.lambda_im_l0.fill_(0)
    module(TensorDict({"x": torch.randn(2, INPUTS), "is_init": torch.zeros(2, dtype=torch.bool)}, [2]))[
        "y"
    ].sum().backward()
    assert getattr(module.net, f"{name}_l0").grad.isfinite().all()


def test_saturated_gates_of_minlstm_stay_finite() -> None:
    cell = MinLSTMCell(feed_forward=0)
    gates = tuple(torch.tensor(values) for values in ([[-500.0, 500.0]], [[-500.0, -500.0]], [[1.0, 1.0]]))
    a, b = cell.coefficients(gates)
    assert a.tolist() == [[0.5, 1.0]]
    assert b.tolist() == [[0.5, 0.0]]


def test_first_values_of_slstm_and_shm() -> None:
    sizes = Sizes(16, 16)
    forget = filled(SLSTMCell(heads=2), sizes)["bias_gates"].chunk(4, -1)[1]
    torch.testing.assert_close(forget, torch.linspace(3, 6, 8).expand(2, 8))
    exponential = filled(SLSTMCell(heads=2, exponential_forget=True), sizes)["bias_gates"].chunk(4, -1)[1]
    torch.testing.assert_close(exponential.exp(), forget.sigmoid())
    assert not filled(SLSTMCell(), sizes)["weight_hidden"].any()
    assert filled(SHMCell(memory_size=22))["theta"].abs().max() <= math.sqrt(6 / (128 + 22))


def steps(cell: Cell, weights: dict[str, torch.Tensor], inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Features and states after steps from zeros."""
    packed = cell.pack([weights.get(parameter) for parameter in cell.parameter_names])
    states = tuple(inputs.new_zeros(1, *shape) for shape in cell.state_shapes(SIZES))
    features, after = [], []
    for x in inputs:
        y, states = cell.step(x.unsqueeze(0), states, *packed)
        features.append(y)
        after.append(states)
    return torch.cat(features), *map(torch.cat, zip(*after, strict=True))


@pytest.mark.parametrize("size", [-300.0, 300.0])
@pytest.mark.parametrize("exponential", [False, True])
def test_gates_of_slstm_do_not_overflow(size: float, exponential: bool) -> None:
    """Input gates exp(300) or exp(-300), in float32; n is at least 1 after every step, so that c / n is a mean."""
    cell = SLSTMCell(exponential_forget=exponential)
    weights = {name: value.float().requires_grad_() for name, value in parameters(cell).items()}
    with torch.no_grad():
        weights["bias_gates"][:, : 2 * HIDDEN] += size
    features, h, _, n, m = steps(cell, weights, torch.randn(300, INPUTS))
    assert all(value.isfinite().all() for value in (features, h, n, m))
    assert n.min() >= 1
    assert h.abs().max() <= 1
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(features.sum(), list(weights.values())))


def test_a_constant_in_the_gates_of_slstm_changes_only_m() -> None:
    """Input gates that are exp(5) times as large weigh inputs alike, from the first step on."""
    cell = SLSTMCell(feed_forward=0)
    weights, inputs = parameters(cell), torch.randn(20, INPUTS, dtype=torch.float64)
    features, h, c, n, m = steps(cell, weights, inputs)
    weights["bias_gates"][:, :HIDDEN] += 5
    torch.testing.assert_close(steps(cell, weights, inputs), (features, h, c, n, m + 5))


@pytest.mark.parametrize("scale", [1.0, 600.0])
@pytest.mark.parametrize("name", [name for name in PAPERS if name != "ffm"])
def test_float16_has_the_gradients_of_float64(name: str, scale: float) -> None:
    """Also of inputs whose squares float16 can't hold."""
    torch.manual_seed(0)
    half = CellNet(name, 16, 16, dtype=torch.float16)
    wide, x = copy.deepcopy(half).double(), (scale * torch.randn(30, 2, 16)).half()
    for net in (half, wide):
        net(x.to(net.dtype))[0].sum().backward()
    found, exact = (torch.cat([one.grad.double().flatten() for one in net.parameters()]) for net in (half, wide))
    assert (found - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gate", [20.0, 24.0, 50.0, 70.0, 400.0])
def test_queries_of_zero_leave_mlstm_finite(gate: float, dtype: torch.dtype) -> None:
    """Whatever the input gate is, the published quotient is then 0 / max(0, 1), and its gradient finite."""
    torch.manual_seed(0)
    net = CellNet("mlstm(heads=2)", 3, 6, dtype=dtype)
    with torch.no_grad():
        net.gates_input_l0.fill_(gate)
    result = net(torch.zeros(5, 2, 3, dtype=dtype))[0]
    result.sum().backward()
    assert torch.equal(result, torch.zeros_like(result))
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


def test_closed_input_gates_of_mlstm_leave_float16_gradients_finite() -> None:
    """The divisor is then exp(20), which float16 can't hold."""
    torch.manual_seed(0)
    net = CellNet("mlstm(heads=2)", 3, 6, dtype=torch.float16)
    with torch.no_grad():
        net.gates_input_l0.fill_(-20)
        net.gates_forget_l0.fill_(-25)
    net(torch.randn(20, 2, 3).half())[0].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_rows_of_shm_take_turns_in_every_dtype(dtype: torch.dtype) -> None:
    """Also over sequences, past the numbers that a dtype can count to; each sequence goes on from its stored number.

    A number that isn't whole is rounded.
    """
    tokens = 3000
    starts = torch.zeros(tokens, dtype=torch.bool)
    starts[[0, 700]] = True
    stored = torch.full((tokens, 1), 0.3, dtype=dtype)
    stored[700] = 255
    found = Segments(Boundaries(starts, (tokens,)), "loop").count(stored, 256)
    expected = [(t + 1) % 256 for t in range(700)] + [(255 + t + 1) % 256 for t in range(tokens - 700)]
    assert found.squeeze(1).tolist() == expected
    turn, stepped = stored[:1], []
    for _ in range(700):
        turn = ONE_STEP.count(turn, 256)
        stepped.append(turn.item())
    assert stepped == expected[:700]


def test_every_row_of_shm_is_learned() -> None:
    cell = SHMCell(memory_size=3, rows=5)
    weights = {name: value.requires_grad_() for name, value in parameters(cell).items()}
    features, memory, turn = steps(cell, weights, torch.randn(7, INPUTS, dtype=torch.float64))
    assert turn.squeeze(1).tolist() == [1, 2, 3, 4, 0, 1, 2]
    (gradient,) = torch.autograd.grad(features[-1].sum() + memory[-1].sum(), weights["theta"])
    assert gradient.any(-1).all()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MinGRUCell(state_size=0), ArgumentError, "state_size must be at least 1, got 0"),
        (lambda: MinGRUCell(state_size=2.5), ArgumentTypeError, r"state_size must be an int, got 2\.5"),
        (lambda: MinLSTMCell(conv_width=1), ArgumentError, "conv_width must be 0, for none, or at least 2"),
        (lambda: MinLSTMCell(feed_forward=-1), ArgumentError, "feed_forward must be at least 0, got -1"),
        (lambda: S5Cell(state_size=7), ArgumentError, "state_size must be even.*got 7"),
        (lambda: S5Cell(min_step=0.5), ArgumentError, r"must be positive, finite and in order, got 0\.5"),
        (lambda: S5Cell(max_step=math.inf), ArgumentError, r"positive, finite and in order, got 0\.001 and inf"),
        (lambda: S5Cell(norm="no"), ArgumentTypeError, "norm must be True or False, got 'no'"),
        (lambda: S5Cell(min_step=True), ArgumentTypeError, "min_step must be a number, got True"),
        (lambda: LRUCell(min_radius="0.5"), ArgumentTypeError, r"min_radius must be a number, got '0\.5'"),
        (lambda: LRUCell(max_radius=1.5), ArgumentError, r"min_radius and max_radius must be in order and in \[0, 1\]"),
        (lambda: LRUCell(max_phase=0.0), ArgumentError, "max_phase must be positive and finite, got 0"),
        (lambda: LRUCell(max_phase=math.nan), ArgumentError, "max_phase must be positive and finite, got nan"),
        (lambda: RGLRUCell(heads=3).parameters(SIZES), ArgumentError, "heads must divide the state's width, 4; got 3"),
        (lambda: GTrXLCell(heads=3).parameters(SIZES), ArgumentError, "size, 4; got 3. Use 1, 2, 4, .* head_size"),
        (lambda: MLSTMCell(heads=8).parameters(SIZES), ArgumentError, "8, into parts of 2 or more; got 8. Use 1, 2, 4"),
        (lambda: Mamba2Cell(heads=3).parameters(SIZES), ArgumentError, "times hidden_size, 8; got 3. Use 1, 2, 4"),
        (lambda: GatedDeltaNetCell(heads=3).parameters(SIZES), ArgumentError, "size, 4; got 3. .*, or give key_size"),
        (lambda: GatedDeltaNetCell(heads=0), ArgumentError, "heads must be at least 1, got 0"),
        (lambda: Mamba2Cell(state_size=0), ArgumentError, "state_size must be at least 1, got 0"),
        (lambda: MLSTMCell(conv_width=1), ArgumentError, "conv_width must be 0, for none, or at least 2"),
        (lambda: FFMCell(context_size=0), ArgumentError, "context_size must be at least 1, got 0"),
        (lambda: SLSTMCell(heads=3).parameters(SIZES), ArgumentError, "heads must divide hidden_size, 4, .*; got 3"),
        (lambda: SLSTMCell(heads=4).parameters(SIZES), ArgumentError, "4, into parts of 2 or more; got 4"),
        (lambda: SLSTMCell(heads=0), ArgumentError, "heads must be at least 1, got 0"),
        (lambda: SLSTMCell(conv_width=1), ArgumentError, "conv_width must be 0, for none, or at least 2"),
        (lambda: SLSTMCell(feed_forward=-0.5), ArgumentError, r"feed_forward must be at least 0 and finite, got -0\.5"),
        (lambda: SLSTMCell(feed_forward=math.nan), ArgumentError, "at least 0 and finite, got nan"),
        (lambda: SLSTMCell(exponential_forget=1), ArgumentTypeError, "exponential_forget must be True or False, got 1"),
        (lambda: SHMCell(memory_size=0), ArgumentError, "memory_size must be at least 1, got 0"),
        (lambda: SHMCell(rows=257), ArgumentError, "rows must be at most 256, .*; got 257"),
    ],
)
def test_options_that_are_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("cell", "option"),
    [
        (type(cell), field.name)
        for cell in CELLS.values()
        if is_dataclass(cell)
        for field in fields(cell)
        if field.default is not None
    ],
)
def test_options_without_a_number(cell: type, option: str) -> None:
    """None is refused where it isn't the default."""
    with pytest.raises(ArgumentTypeError, match=f"{option} must be .*, got None"):
        cell(**{option: None})
