"""Graphs rewritten by columns have the numbers, shapes and memory layouts of the original graphs, at any size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from recurl.collectors import Collector
from recurl.envs import TensorEnv
from recurl.envs.tasks import MaskedCartPole
from recurl.execution import traced
from recurl.execution.columns import (
    MAX_COLUMNS,
    join_columns,
    scalarize_columns,
    scalarize_loop,
    split_columns,
    take_constants,
)
from recurl.execution.traced import InductorFunction

ROWS = 96


def same(function, *examples, rows=ROWS):
    """Return the graph by columns, after checking that results and strides are those of the function."""
    graph = make_fx(function, tracing_mode="fake")(*examples)
    columns = scalarize_columns(graph, rows)
    expected, found = (made(*(example.clone() for example in examples)) for made in (graph, columns))
    for wanted, result in zip(expected, found, strict=True):
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        assert [s for s, n in zip(result.stride(), result.shape, strict=True) if n > 1] == [
            s for s, n in zip(wanted.stride(), wanted.shape, strict=True) if n > 1
        ]
        torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-13, equal_nan=True)
    return columns


def whole(columns):
    """Return the operations on tensors that aren't vectors."""
    names = (str(node.target) for node in columns.graph.nodes if node.op == "call_function")
    return [name for name in names if not name.startswith(("aten.select", "aten.slice", "aten.stack", "aten.view"))]


def x(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


FUNCTIONS = {
    "rows first": (lambda a, b: (a * 2 + b, (a > b).float()), x(ROWS, 3), x(ROWS, 1)),
    "rows last": (lambda a, b: (torch.where(b, a, -a),), x(4, ROWS), x(ROWS) > 0),
    "rows between": (lambda a: ((a + 1).tanh(), a.transpose(0, 1) * 2), x(2, ROWS, 3)),
    "permuted": (lambda a: ((a * 2).t(), a.t().exp(), a.permute(1, 0)[None] + 1), x(ROWS, 3)),
    "constants": (lambda a, b, c: (a * b + c, a + 2, c * 2), x(ROWS, 3), x(3), x(1, 3).float()),
    "one number": (lambda a, b: (a * b, a.float() + b, a + b.float()), x(ROWS, 2), x(1)[0]),
    "views": (lambda a: (a.view(ROWS, 2, 3)[:, 1] * 2, a.unsqueeze(1).expand(ROWS, 2, 6) + 1), x(ROWS, 6)),
    "parts": (lambda a: (*(p * 2 for p in a.unbind(1)), *(p + 1 for p in a.split([1, 2, 3], 1))), x(ROWS, 6)),
    "slices": (lambda a: (a[:, 1:5:2] * 2, a[:, -2:] + 1, a[:, :0] + 1, a[..., 3] * 3), x(ROWS, 6)),
    "some rows": (lambda a: (a[1:] * 2, a[5] + 1), x(ROWS, 2)),
    "together": (lambda a: (torch.stack([a, -a], 1) * 2, torch.cat([a, -a], 1) + 1, torch.cat([a, -a])), x(ROWS, 2)),
    "sums": (lambda a: (a.sum(1), a.sum(-1, keepdim=True), (a > 0).sum(1), a.sum(0), a.sum()), x(ROWS, 3)),
    "two dimensions": (lambda a: (a.sum((0, 2)), a.sum((0, 2), keepdim=True), a.sum((1,))), x(2, ROWS, 3)),
    "all": (lambda a: ((a > 0).all(1), (a > 0).any(1, keepdim=True), a.all(1)), x(ROWS, 3)),
    "softmax": (lambda a: (a.softmax(1), a.log_softmax(-1), a.t().softmax(0), a.softmax(0)), x(ROWS, 5) * 9),
    "gather": (lambda a, i: (a.gather(1, i), a.gather(1, i[:, :1]) * 2), x(ROWS, 3), (x(ROWS, 2) > 0).long() * 2),
    "table": (lambda t, i: (t[i] * 2, t[i[:, 0]]), x(5), (x(ROWS, 1).abs() * 2).long().clamp(max=4)),
    "largest": (lambda a: (*a.max(1), *a.t().max(0), *a.max(1, keepdim=True)), x(ROWS, 4).round()),
    "not a number": (lambda a: (*a.max(1), a.softmax(1)), torch.where(x(ROWS, 3) > 0.7, torch.nan, x(ROWS, 3))),
    "converted": (lambda a: (a.float() * 2, a.long() + 1, (a > 0).to(torch.uint8), a.clone() * 3), x(ROWS, 2)),
    "wide": (lambda a, b: (a * 2 + b, (a * b).sum(1)), x(ROWS, MAX_COLUMNS + 1), x(ROWS, 1)),
    "square": (lambda a: (a @ a, a * 2, (a * 2).sum(0)), x(ROWS, ROWS)),
    "products": (lambda a, w: (torch.addmm(w[0], a, w), (a * 2) @ w), x(ROWS, 3), x(3, 3)),
    "arguments": (lambda a: (a, a.t(), a[:, :1], a * 1), x(ROWS, 2)),
    "together, of several dtypes": (
        lambda a: (torch.cat([a.float(), a.long()], 1)[:, 1:] / 3, torch.stack([a[:, 0].int(), a[:, 0]], 1)[:, :1] + 0),
        x(ROWS, 1) * 5,
    ),
    "an empty part": (lambda a: (*a.split([0, 3], 1), *(part + 1 for part in a.split([3, 0], 1))), x(ROWS, 3)),
    "views of views": (lambda a: ((a * 2).t()[::2][:, 1:].t().view(-1) * 1,), x(ROWS, 4)),
    "memory as it lies": (lambda a: ((a * 2)[:, 1].as_strided((ROWS, 2), (3, 1), 0) * 1,), x(ROWS, 3)),
    "nothing": (lambda a: (a[:, :0] * 2, a.new_zeros(ROWS, 2), torch.ones(ROWS, 1)), x(ROWS, 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_numbers(name):
    function, *examples = FUNCTIONS[name]
    same(function, *examples)


def test_narrow_tensors_are_vectors():
    def step(state, action, force):
        place, speed = state.unbind(0)
        speed = speed + force[action] * 0.1
        place = (place + speed).clamp(-1, 1)
        after = torch.stack([place, speed])
        done = place.abs() >= 1
        return torch.where(done, torch.zeros_like(after), after), after.t().float(), done.unsqueeze(-1)

    made = same(step, x(2, ROWS), (x(ROWS) > 0).long(), x(2))
    for node in made.graph.nodes:
        if node.op == "call_function" and "stack" not in str(node.target):
            assert all("stack" not in str(argument.target) for argument in node.all_input_nodes) or "view" in node.name


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["sum", "softmax", "max", "gather", "where"]))
@settings(max_examples=60, deadline=None)
def test_any_sizes(rows, width, what):
    """Includes other dimensions with as many entries as there are rows."""
    functions = {
        "sum": lambda a, b: ((a * b).sum(1), (a + b).sum(0), a.t() * b.t()),
        "softmax": lambda a, b: (a.softmax(1) * b, b.log_softmax(0)),
        "max": lambda a, b: (*(a + b).max(1), *(a - b).max(0)),
        "gather": lambda a, b: (a.gather(1, (b > 0).long() * (a.shape[1] - 1)), a[:, 0] * b[:, -1]),
        "where": lambda a, b: (torch.where(a > b, a, b[:, :1]), torch.stack([a, b]).sum(0) * a[0]),
    }
    same(functions[what], x(rows, width), x(rows, width, seed=1), rows=rows)


def test_tensors_changed_in_place_are_read_in_order():
    def function(a):
        kept = a.clone()
        first = kept * 2
        column = kept[:, 0]
        column.add_(1)
        second = kept * 2
        copy = kept.clone()
        kept.mul_(3)
        noise = torch.empty_like(a).copy_(a + 1)
        return first, second, copy * 2, kept * 2, noise * 2, kept[:, 1] + column, noise

    same(function, x(ROWS, 2))


def test_columns_are_read_before_later_changes_in_place():
    """With a single column no operation is left that would read it."""

    def function(a):
        kept, flags = a.clone(), a > 0
        read = (kept.sum(1), kept.max(1)[0], kept.gather(1, torch.zeros_like(kept, dtype=torch.int64)), flags.all(1))
        put = (torch.stack([kept, kept], 1), torch.cat([kept, kept], 1))
        kept.mul_(3)
        flags.logical_not_()
        return *read, *put

    same(function, x(ROWS, 1))


def test_changes_through_other_arguments_and_hidden_views():
    def function(a):
        first, second = a * 2, a * 3
        column, before = second[:, 0], first + 1
        torch._foreach_add_([first, second], 1.0)
        between = first + 1, column * 2
        torch.add(a, a, out=second)
        flat, other = a.t().reshape(-1), a.t().reshape(-1)
        flat.add_(1)
        return before, *between, first.sum(1), second * 2, column * 2, flat, other

    same(function, x(ROWS, 2))


def test_results_alias_arguments_only_where_they_did():
    def function(a):
        return a.clone(), a[:, 0].clone(), a.sum(1), a[:, :1]

    example = x(ROWS, 1)
    columns = scalarize_columns(make_fx(function, tracing_mode="fake")(example), ROWS)
    assert [result.data_ptr() == example.data_ptr() for result in columns(example)] == [False, False, False, True]


def test_draws_are_left_whole():
    graph = make_fx(lambda a: (torch.bernoulli(a.sigmoid()), torch.rand_like(a)), tracing_mode="fake")(x(ROWS, 2))
    operations = whole(scalarize_columns(graph, ROWS))
    assert sum("bernoulli" in name for name in operations) == sum("rand" in name for name in operations) == 1


def test_a_step_of_an_environment_is_compiled_by_columns(monkeypatch):
    """Compiled on the device where it is faster; compiled batches have the same numbers as others."""
    counts = []

    def counted(graph, rows, count):
        made, entering, leaving = scalarize_loop(graph, rows, count)
        counts.append((rows, len(made.graph.nodes) - len(graph.graph.nodes), entering, leaving))
        return made, entering, leaving

    monkeypatch.setattr(traced, "scalarize_loop", counted)
    monkeypatch.setattr(traced, "_SUMS_ON", ("cpu",))
    batches = []
    for compiled in (False, True):
        env = TensorEnv(MaskedCartPole(6), 24, categorical_action_encoding=True)
        env.set_seed(0)
        collector = Collector(env, None, frames_per_batch=24 * 12, compile_step=compiled)
        torch.manual_seed(0)
        first, second = collector.collect(), collector.collect()
        ids = second["collector", "traj_ids"]
        ids -= first["collector", "traj_ids"][0, 0]
        batches.append(second)
        assert all(entry.is_contiguous() for entry in second.values(True, True))
    (rows, more, entering, leaving), *_ = counts
    assert (len(counts), rows) == (1, 24)
    assert more != 0
    assert None not in (*entering, *leaving)
    assert [*entering] == leaving[-len(entering) :]
    plain, compiled = batches
    for key in plain.keys(True, True):
        torch.testing.assert_close(compiled[key], plain[key], rtol=1e-6, atol=1e-6)


def test_programs_of_layers_between_narrow_ends(monkeypatch):
    monkeypatch.setattr(traced, "_SUMS_ON", ("cpu",))
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    def act(state):
        scores = net(state.t()).log_softmax(-1)
        best, action = scores.max(-1)
        return state + torch.stack([best, action.double()]), action

    state = x(2, 40)
    expected = act(state)
    made = InductorFunction(lambda state: act(state)[::-1], [state], rows=40)
    assert [form and form.width for form in (*made.entering, *made.leaving)] == [2, 1, 2]
    action, after = join_columns(made.leaving, [made(*split_columns(made.entering, [state]))], 0)
    torch.testing.assert_close(after[0], expected[0])
    assert torch.equal(action[0], expected[1])


def looped(step, *given, rows=ROWS):
    """Return graph and layouts of a step, after checking three steps against the function."""
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    made, entering, leaving = scalarize_loop(graph, rows, len(given))
    current, expected, found = given, [], []
    apart = split_columns(entering, given)
    for _ in range(3):
        results = step(*(tensor.clone() for tensor in current))
        current = results[len(results) - len(given) :]
        expected.append(results)
        found.append(made(*apart))
        apart = found[-1][len(found[-1]) - len(apart) :]
        assert all(vector.is_contiguous() for vector in apart)
    wanted = [torch.stack(tensors) for tensors in zip(*expected, strict=True)]
    for one, other in zip(join_columns(leaving, found, 0), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    assert leaving[len(leaving) - len(given) :] == entering
    return made, entering, leaving


def widths(forms):
    return [None if form is None else form.width for form in forms]


def test_narrow_tensors_stay_split_between_steps():
    def step(state, hidden, flag):
        place, speed = state.unbind(0)
        after = torch.stack([place + speed, speed * 0.9])
        done = (after[0] > 1).unsqueeze(-1)
        return after.t().float(), torch.ones(ROWS, 1), hidden[:, 0], after, hidden.tanh() * ~flag, done

    made, entering, leaving = looped(step, x(2, ROWS), x(ROWS, MAX_COLUMNS + 8), x(ROWS, 1) > 0)
    assert widths(entering) == [2, None, 1]
    assert widths(leaving) == [2, None, None, 2, None, 1]  # a column of a whole tensor is whole too
    assert not [node for node in made.graph.nodes if "stack" in str(node.target)]


def test_tensors_needed_whole_stay_whole():
    """Operands of products, tensors that change in place, and operations without a rule stay whole."""
    weight = x(3, 3)

    def step(read, edited, unknown, passed, swapped, other):
        edited = edited.clone()
        out = read @ weight
        kept = edited * 1
        edited.add_(1)
        return out, kept, read * 0.5, edited, unknown.flip(1), passed, other, swapped

    given = [x(ROWS, 3, seed=seed) for seed in range(6)]
    _, entering, _ = looped(step, *given)
    assert widths(entering) == [None, None, None, 3, 3, 3]


def test_arguments_changed_in_place_enter_whole():
    def step(a, b):
        return a * 2, b + a, b

    def changing(a, b):
        b = b.add(0)
        return a * 2, (a + b).mul_(2), b

    assert widths(looped(step, x(ROWS, 2), x(ROWS, 2))[1]) == [2, 2]
    looped(changing, x(ROWS, 2), x(ROWS, 2))


@given(st.data(), st.integers(2, 7), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_any_loop(data, rows, count):
    """Arguments of various shapes, in steps that mix and swap them."""
    shapes = [(rows,), (rows, 1), (rows, 2), (2, rows), (1, rows, 2), (rows, MAX_COLUMNS + 1), (3,), ()]
    given = [x(*data.draw(st.sampled_from(shapes)), seed=seed) for seed in range(count)]
    kinds = [data.draw(st.sampled_from(["same", "half", "softmax", "flipped", "product", "zero"])) for _ in given]
    written = data.draw(st.permutations(range(count)))

    def apply(kind, tensor):
        if kind == "softmax" and tensor.ndim:
            return tensor.softmax(-1)
        if kind == "flipped" and tensor.ndim:
            return tensor.flip(-1)
        if kind == "product" and tensor.ndim == 2:
            return tensor @ torch.ones(tensor.shape[1], tensor.shape[1], dtype=tensor.dtype) * 0.1
        return {"same": lambda: tensor, "zero": lambda: torch.zeros_like(tensor)}.get(kind, lambda: tensor * 0.5)()

    def step(*tensors):
        after = [apply(kind, tensor) for kind, tensor in zip(kinds, tensors, strict=True)]
        return (*(tensors[index] for index in written), *(after[index] + 1 for index in written), *after)

    looped(step, *given, rows=rows)


def test_results_that_depend_on_nothing_are_computed_once():
    kept = x(3)

    def step(a):
        changed = torch.zeros(2)
        changed.add_(a.sum())
        return torch.ones(3) * 2, a + 1, changed, torch.arange(4), kept, a

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x(2))
    constants = take_constants(graph)
    assert {position: tensor.tolist() for position, tensor in constants.items()} == {0: [2, 2, 2], 3: [0, 1, 2, 3]}
    assert len(graph(x(2))) == 4
