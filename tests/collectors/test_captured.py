"""Captured and replayed steps: the bookkeeping around a CUDA graph, with a fake capture that runs everything again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector, captured
from recurl.core.errors import RecurlWarning, UnsupportedError, UsageError
from recurl.envs import (
    ExplorationType,
    GymEnv,
    InitTracker,
    ObservationDelay,
    ObservationNoise,
    PreviousAction,
    RewardSum,
    StepCounter,
    TensorEnv,
)
from recurl.envs.tasks import Dynamics, MaskedArm, MaskedCartPole, RepeatPrevious, TMaze
from recurl.execution import traced
from recurl.execution.background import compiled_later
from recurl.modules import Categorical, LSTMModule, ProbabilisticActor
from recurl.sequences.start_states import state_in

pytestmark = pytest.mark.usefixtures("recorded")

TASKS = [MaskedArm(max_episode_steps=7), MaskedCartPole(12), RepeatPrevious(2, 3, 7), TMaze(2)]


def make(dynamics, *, lowered=True, sensors=(), **options) -> Collector:
    env = TensorEnv(dynamics, 5, device="cpu")
    for transform in (*sensors, InitTracker(), StepCounter(), RewardSum(), PreviousAction(env.action_spec_unbatched)):
        env = env.append_transform(transform)
    torch.manual_seed(0)
    width = env.observation_spec["observation"].shape[-1]
    memory = LSTMModule(width, 8, in_key="observation", out_key="features")
    real = env.action_spec.dtype.is_floating_point
    head = TensorDictModule(nn.Linear(8, env.action_spec.shape[-1]), ["features"], ["action" if real else "logits"])
    actor = head
    if not real:
        actor = ProbabilisticActor(head, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
    policy = TensorDictSequential(memory, actor)
    if not lowered:
        policy = Plain(policy)
    env.set_seed(3)
    return Collector(env, policy, frames_per_batch=5 * 6, **options)


class Plain(TensorDictSequential):
    """A policy that can't be lowered."""

    def forward(self, tensordict):
        return super().forward(tensordict)


def batches(collector, count):
    return [collector.collect() for _ in range(count)]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        a, b = (batch.exclude(("collector", "traj_ids")) for batch in (a, b))
        assert (a == b).all()
        assert a.names == b.names


@pytest.mark.parametrize("dynamics", TASKS, ids=lambda made: type(made).__name__)
@pytest.mark.parametrize("lowered", [True, False])
def test_batches_are_those_of_single_launches(dynamics, lowered, recorded):
    torch.manual_seed(1)
    expected = batches(make(dynamics, lowered=lowered), 6)
    torch.manual_seed(1)
    collector = make(dynamics, lowered=lowered, cuda_graph=True)
    assert (collector.explain()["tensors"] is None) == lowered
    found = batches(collector, 6)
    assert_same(found, expected)
    assert len(recorded) == 1
    assert collector.frames == 6 * 30
    ids = torch.stack([batch["collector", "traj_ids"] for batch in found])
    steps = torch.stack([batch["collector", "traj_steps"] for batch in found])
    ids, steps = (part.movedim(0, 1).flatten(1) for part in (ids, steps))
    continues = steps[:, 1:] > 0
    assert torch.equal(ids[:, 1:] == ids[:, :-1], continues)
    assert len(ids.unique()) == int((~continues).sum()) + 5


@pytest.mark.parametrize("compiled", [False, True])
def test_noise_and_delays_are_those_of_single_launches(compiled, recorded):
    sensors = (ObservationNoise(0.1), ObservationDelay((1, 3)))
    runs = []
    for options in ({}, {"cuda_graph": True, "compile_step": compiled}):
        torch.manual_seed(1)
        runs.append(changed(make(MaskedArm(max_episode_steps=7), sensors=sensors, **options)))
    found, expected = ([batch.to(torch.float64) for batch in run] for run in runs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one["observation"], other["observation"])
        assert torch.equal(one["observation_delay"], other["observation_delay"])
    assert recorded


@pytest.mark.parametrize("lowered", [True, False])
def test_states_at_the_starts_of_sequences_are_those_of_single_launches(lowered, recorded):
    torch.manual_seed(1)
    expected = batches(make(TMaze(2), lowered=lowered, sequence_length=3), 5)
    torch.manual_seed(1)
    found = batches(make(TMaze(2), lowered=lowered, sequence_length=3, cuda_graph=True), 5)
    assert_same(found, expected)
    torch.manual_seed(1)
    every = batches(make(TMaze(2), lowered=lowered), 5)
    for sparse, dense in zip(found, every, strict=True):
        for key in ("recurrent_state_h", "recurrent_state_c"):
            assert torch.equal(state_in(sparse, key, (1, 8)), dense[key][:, ::3])
            assert ("next", key) not in sparse.keys(True)
    assert bool(sparse["recurrent_state_c", "every_3"].any())
    assert len(recorded) == 1


def test_batches_keep_their_memory():
    collector = make(TMaze(2), cuda_graph=True)
    batches(collector, 2)
    first = collector.collect()
    before = first.clone()
    batches(collector, 2)
    assert (first == before).all()


def changed(collector):
    """Changes that may happen between two batches."""
    found = batches(collector, 4)
    collector.reset_rows(torch.tensor([True, False, False, True, False]))
    found += batches(collector, 1)
    with torch.no_grad():
        for parameter in collector.policy.parameters():
            parameter.mul_(1.5)
    found += batches(collector, 2)
    state = collector.state_dict()
    draws = torch.get_rng_state()
    found += batches(collector, 2)
    collector.load_state_dict(state)
    torch.set_rng_state(draws)
    found += batches(collector, 2)
    assert_same(found[-4:-2], found[-2:])
    collector.exploration_type = ExplorationType.MODE
    return found + batches(collector, 2)


def test_changes_between_batches(recorded):
    torch.manual_seed(1)
    expected = changed(make(RepeatPrevious(2, 3, 7)))
    torch.manual_seed(1)
    found = changed(make(RepeatPrevious(2, 3, 7), cuda_graph=True))
    assert_same(found, expected)
    assert len(recorded) == 2  # again with the other exploration


def test_hooks_and_modes_between_batches_count(recorded):
    def run(**options):
        collector = make(TMaze(2), **options)
        found = batches(collector, 4)
        handle = collector.policy[0].register_forward_hook(
            lambda *given: given[-1].set("features", given[-1]["features"] * 0)
        )
        found += batches(collector, 2)
        handle.remove()
        found += batches(collector, 2)
        collector.policy.eval()
        return found + batches(collector, 2)

    torch.manual_seed(1)
    expected = run()
    torch.manual_seed(1)
    assert_same(run(cuda_graph=True), expected)
    assert len(recorded) == 4


def forward_of_its_own(policy):
    def forward(tensordict):
        return type(head).forward(head, tensordict).update({"logits": -tensordict["features"][..., :2]})

    head = policy[1][0]
    head.forward = forward


def another_hook(policy):
    policy.handle.remove()
    policy.handle = policy[1][0].module.register_forward_hook(lambda module, given, result: result * -3)


def attribute(policy):
    policy[1][0].module.scale = -3.0


def turned_memory(policy):
    policy[0].module.weight.data = policy[0].module.weight.data.t()


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        forward_of_its_own,
        *(pytest.param(edit, marks=pytest.mark.full) for edit in (another_hook, attribute, turned_memory)),
    ],
)
def test_a_changed_policy_is_recompiled(edit):
    """A compiled step keeps using the values present when it was traced."""

    class Scaled(nn.Linear):
        scale: float

        def forward(self, x):
            return super().forward(x) * self.scale

    def collected(**options):
        env = TensorEnv(MaskedCartPole(12), 5, device="cpu")
        env.set_seed(0)
        torch.manual_seed(0)
        head = Scaled(2, env.action_spec.shape[-1])
        head.scale = 2.0
        actor = ProbabilisticActor(
            TensorDictModule(head, ["features"], ["logits"]), in_keys=["logits"], distribution_class=Categorical
        )
        width = env.observation_spec["observation"].shape[-1]
        policy = TensorDictSequential(TensorDictModule(nn.Linear(width, 2), ["observation"], ["features"]), actor)
        policy.handle = head.register_forward_hook(lambda module, given, result: result * 2)
        collector = Collector(env, policy, frames_per_batch=20, **options)
        found = batches(collector, 3)
        edit(policy)
        return found + batches(collector, 2)

    expected = collected()
    for one, other in zip(expected, collected(compile_step=True), strict=True):
        for key in ("logits", "action", "observation"):
            torch.testing.assert_close(other[key], one[key], rtol=1e-5, atol=1e-6)


def test_a_module_that_counts_its_calls_is_recorded_once(monkeypatch):
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    def record(steps, device, generator):
        count.append(1)
        return lambda: None, steps()

    count = []
    monkeypatch.setattr("recurl.execution.capture.record", record)
    collector = make(TMaze(2), cuda_graph=True)
    collector.policy[1][0].module = Counting(8, 3)
    batches(collector, 5)
    assert count == [1]


@pytest.mark.slow
def test_changes_between_batches_of_vectors(recorded, monkeypatch):
    """Compiled by columns, as on a GPU: captured or not, the same bits; trajectories continue as without."""
    monkeypatch.setattr(traced, "_SUMS_ON", ("cpu",))
    runs = []
    for options in ({}, {"compile_step": True}, {"compile_step": True, "cuda_graph": True}):
        torch.manual_seed(1)
        runs.append(changed(make(RepeatPrevious(2, 3, 7), sequence_length=3, **options)))
    plain, alone, together = runs
    assert_same(together, alone)
    assert len(recorded) == 2
    for one, other in zip(plain, alone, strict=True):
        for key in one.keys(True, True):
            if key != ("collector", "traj_ids"):
                torch.testing.assert_close(other[key], one[key], rtol=1e-5, atol=1e-6)
    ids = [torch.cat([batch["collector", "traj_ids"] for batch in run], 1) for run in runs]
    assert all(torch.equal(run - run[0, 0], ids[0] - ids[0][0, 0]) for run in ids[1:])


@pytest.mark.parametrize("option", ["reset_at_each_iter", "set_truncated"])
def test_options(option):
    torch.manual_seed(1)
    expected = batches(make(TMaze(2), **{option: True}), 5)
    torch.manual_seed(1)
    assert_same(batches(make(TMaze(2), cuda_graph=True, **{option: True}), 5), expected)


def test_random_actions():
    def collector(**options):
        env = TensorEnv(TMaze(2), 5, device="cpu")
        env.set_seed(0)
        return Collector(env, frames_per_batch=20, **options)

    torch.manual_seed(1)
    expected = batches(collector(), 4)
    torch.manual_seed(1)
    assert_same(batches(collector(cuda_graph=True), 4), expected)


def replace_parameter(actor):
    actor[0].module.bias = nn.Parameter(actor[0].module.bias + 1)


def move_data(actor):
    actor[0].module.weight.data = actor[0].module.weight.data * 2


def replace_module(actor):
    actor[0].module = nn.Sequential(actor[0].module, nn.Tanh())


@pytest.mark.parametrize("replace", [replace_parameter, move_data, replace_module])
def test_replaced_weights_are_captured_again(replace, recorded):
    def collected(**options):
        torch.manual_seed(1)
        collector = make(TMaze(2), **options)
        found = batches(collector, 4)
        replace(collector.policy[1])
        return found + batches(collector, 3)

    expected = collected()
    assert_same(collected(cuda_graph=True), expected)
    assert len(recorded) == 2


def test_uncapturable_policies_and_environments(monkeypatch):
    with pytest.raises(UnsupportedError, match=r"can't be a CUDA graph: GymEnv steps on the host"):
        Collector(GymEnv("CartPole-v1"), frames_per_batch=10, cuda_graph=True)
    with pytest.raises(UnsupportedError, match=r"the first 10 frames have random actions"):
        Collector(TensorEnv(TMaze(2), 5, device="cpu"), frames_per_batch=10, init_random_frames=10, cuda_graph=True)
    monkeypatch.setattr(captured, "_DEVICE", "cuda")
    with pytest.raises(UnsupportedError, match=r"the environment is on cpu\. Collect without cuda_graph"):
        make(TMaze(2), cuda_graph=True)


def test_a_step_that_waits_is_named(monkeypatch):
    def refuse(steps, device, generator):
        try:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        finally:
            end_capture()

    def end_capture():
        raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    collector = make(TMaze(2), cuda_graph=True)
    batches(collector, 2)
    monkeypatch.setattr("recurl.execution.capture.record", refuse)
    with pytest.raises(UsageError, match=r"test_captured\.py:\d+ does `raise RuntimeError.*don't wait for the"):
        collector.collect()


class Shifting(Dynamics):
    """Two numbers swapped at every step: the new state aliases the memory of the old one."""

    def __init__(self):
        super().__init__(observation_space=Box(0, 9, (2,), np.float32), actions=2, step_limit=100)

    def begin(self, xp, draw):
        return {"left": draw.integers(5), "right": 4 + draw.integers(5)}

    def advance(self, xp, state, steps, actions):
        swapped = {"left": state["right"], "right": state["left"]}
        return swapped, xp.astype(state["left"], xp.float64), steps < 0

    def observe(self, xp, state, steps):
        return xp.astype(xp.stack([state["left"], state["right"]], axis=-1), xp.float32)


def test_states_that_change_places():
    def collected(**options):
        env = TensorEnv(Shifting(), 4, device="cpu")
        env.set_seed(0)
        torch.manual_seed(1)
        return batches(Collector(env, frames_per_batch=4, **options), 6)

    assert_same(collected(cuda_graph=True), collected())


class Turned(Shifting):
    """A wide state and wide observations whose rows are contiguous in memory, or not."""

    def __init__(self):
        Dynamics.__init__(self, observation_space=Box(-9, 9, (12,), np.float32), actions=2, step_limit=3)

    def begin(self, xp, draw):
        return {"turned": xp.stack([draw.uniform(0, 1) for _ in range(12)], axis=1).T, "not": draw.uniform(0, 1, (12,))}

    def advance(self, xp, state, steps, actions):
        return {"turned": state["not"] + actions, "not": state["turned"]}, state["not"][0] * 1, steps < 0

    def observe(self, xp, state, steps):
        return xp.stack([xp.astype(state["turned"][i], xp.float32) for i in range(12)], axis=0).T


def test_a_compiled_step_of_tensors_whose_memory_is_turned():
    def collected(**options):
        env = TensorEnv(Turned(), 5, device="cpu", categorical_action_encoding=True)
        env.set_seed(0)
        torch.manual_seed(1)
        return batches(Collector(env, frames_per_batch=20, **options), 5)

    expected = collected()
    for graph in (False, True):
        assert_same(collected(compile_step=True, cuda_graph=graph), expected)


@pytest.mark.parametrize("options", [{}, {"compile_step": True}])
def test_a_restored_state_may_have_another_order(options):
    def collected(turn, **graph):
        torch.manual_seed(1)
        collector = make(TMaze(2), **graph)
        found = batches(collector, 3)
        state = collector.state_dict()
        state["env"]["tensors"] = dict(turn(state["env"]["tensors"].items()))
        collector.load_state_dict(state)
        return found + batches(collector, 2)

    assert_same(collected(reversed, cuda_graph=True, **options), collected(list, **options))


@pytest.mark.slow
@pytest.mark.parametrize("lowered", [True, False])
def test_a_compiled_step(lowered, recorded):
    torch.manual_seed(1)
    expected = batches(make(MaskedCartPole(12), lowered=lowered), 5)
    found = []
    for graph in (False, True):
        torch.manual_seed(1)
        found.append(batches(make(MaskedCartPole(12), lowered=lowered, compile_step=True, cuda_graph=graph), 5))
    assert_same(*found)
    assert len(recorded) == 1
    for plain, compiled in zip(expected, found[0], strict=True):
        plain, compiled = (batch.exclude(("collector", "traj_ids")) for batch in (plain, compiled))
        assert set(plain.keys(True, True)) == set(compiled.keys(True, True))
        for key, value in plain.items(True, True):
            torch.testing.assert_close(compiled[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lowered", [True, False])
@pytest.mark.parametrize("graph", [False, True])
def test_a_step_that_is_compiled_later(lowered, graph, recorded, monkeypatch):
    """The first batch is that of a collector that doesn't compile, and the step is traced once."""

    class Counted(captured.InductorFunction):
        def __init__(self, *given, **options):
            traced.append(given)
            super().__init__(*given, **options)

    traced = []
    monkeypatch.setattr(captured, "InductorFunction", Counted)
    torch.manual_seed(1)
    expected = batches(make(MaskedCartPole(12), lowered=lowered), 8)
    torch.manual_seed(1)
    collector = make(MaskedCartPole(12), lowered=lowered, compile_step=True, cuda_graph=graph)
    with compiled_later():
        found = batches(collector, 1)
    assert_same(found, expected[:1])
    assert len(traced) == 1
    found += batches(collector, 5)
    with monkeypatch.context() as uncompiled:
        uncompiled.setattr(Counted, "__call__", None)
        with compiled_later():
            found += batches(collector, 1)
    found += batches(collector, 1)
    assert len(traced) == 1
    assert len(recorded) == graph
    assert collector.frames == 8 * 30
    for plain, compiled in zip(expected, found, strict=True):
        plain, compiled = (batch.exclude(("collector", "traj_ids")) for batch in (plain, compiled))
        for key, value in plain.items(True, True):
            torch.testing.assert_close(compiled[key], value, rtol=1e-5, atol=1e-6)
    ids, steps = (
        torch.cat([batch["collector", key] for batch in found], 1).flatten(1) for key in ("traj_ids", "traj_steps")
    )
    continues = steps[:, 1:] > 0
    assert torch.equal(ids[:, 1:] == ids[:, :-1], continues)
    assert len(ids.unique()) == int((~continues).sum()) + 5


@pytest.mark.slow
def test_changes_between_batches_of_compiled_steps():
    torch.manual_seed(1)
    expected = changed(make(TMaze(2), compile_step=True))
    torch.manual_seed(1)
    assert_same(changed(make(TMaze(2), compile_step=True, cuda_graph=True)), expected)


def test_uncompilable_policies_and_environments():
    with pytest.raises(UnsupportedError, match=r"be compiled: GymEnv steps on the host\. Collect without compile"):
        Collector(GymEnv("CartPole-v1"), frames_per_batch=10, compile_step=True)

    class Reads(TensorDictSequential):
        def forward(self, tensordict):
            return super().forward(tensordict) if tensordict["observation"].sum() < 1e9 else tensordict

    collector = make(TMaze(2), compile_step=True)
    collector.policy = Reads(collector.policy)
    with pytest.raises(
        UnsupportedError, match=r"read back to the host, but .*test_captured\.py:\d+ does `return super"
    ):
        collector.collect()


def test_replaced_entries_may_be_in_memory_of_the_graph():
    collector = make(TMaze(2), cuda_graph=True)
    batches(collector, 3)
    (root,) = collector._roots
    first, second = root.get("terminated"), root.get("truncated")
    first.fill_(True)
    second.fill_(False)
    root.set("terminated", second)
    root.set("truncated", first)
    batch = collector.collect()
    assert not batch["terminated"][:, 0].any()
    assert batch["truncated"][:, 0].all()


@pytest.mark.parametrize("graph", [False, True])
def test_a_step_that_the_compiler_fails_on_runs_uncompiled(graph, recorded, monkeypatch):
    """Nothing has changed before: the same numbers, random draws and ids as without the option."""

    def fail(*given):
        tried.append(given)
        raise RuntimeError(f"PassManager::run failed, {'with' if graph else 'without'} a graph")

    tried = []
    monkeypatch.setattr(traced, "inductor_program", fail)
    usual = make(RepeatPrevious(2, 3, 7), cuda_graph=graph)
    expected = batches(usual, 5)
    collector = make(RepeatPrevious(2, 3, 7), cuda_graph=graph, compile_step=True)
    with pytest.warns(RecurlWarning, match="The compiler failed on the step of policy and environment") as warned:
        found = batches(collector, 5)
    assert len(warned) == 1
    assert_same(found, expected)
    ids = [[batch["collector", "traj_ids"] for batch in run] for run in (expected, found)]
    first = [run[0].min() for run in ids]
    assert all(torch.equal(b - first[1], a - first[0]) for a, b in zip(*ids, strict=True))
    assert len(tried) == 2
    assert len(recorded) == 2 * graph
    assert "the compiler failed" in collector.explain()["Inductor of all steps"]
    assert collector.explain().form == usual.explain().form


def test_errors_of_a_policy_are_its_own():
    class Faulty(nn.Linear):
        def forward(self, x):
            raise ValueError("of the user")

    collector = make(TMaze(2), compile_step=True)
    collector.policy[1][0].module = Faulty(8, 3)
    with pytest.raises(ValueError, match="of the user"):
        collector.collect()
