"""Sparse recurrent states: code that reads them, and code that rejects them."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, UsageError
from recurl.data import LazyTensorStorage, ListStorage, SequenceMinibatches, SliceSampler, TensorDictReplayBuffer
from recurl.diagnostics import check_batch
from recurl.envs import GroupedEnv, GymEnv, TensorEnv
from recurl.envs.tasks import MaskedCartPole
from recurl.modules import (
    Categorical,
    CellModule,
    GatedDeltaNetModule,
    GTrXLModule,
    LSTMModule,
    Mamba2Module,
    MLSTMModule,
    ProbabilisticActor,
    SHMModule,
    set_recurrent_mode,
)
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from recurl.recurrence import Cell
from recurl.sequences.entries import Entries
from recurl.sequences.start_states import allocate, sparse_values, state_in

ROWS, STEPS, LENGTH = 3, 24, 6


class Case:
    """A policy with two memories, and its batches."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.trunk = LSTMModule(2, 5, num_layers=2, in_key="observation", out_key="memory")
        keys = ["memory", ("critic", "h"), ("critic", "c")]
        self.memory = LSTMModule(5, 4, in_keys=keys, out_keys=["more", ("next", *keys[1]), ("next", *keys[2])])
        head = TensorDictModule(nn.Linear(5, 2), in_keys=["memory"], out_keys=["logits"])
        value = TensorDictModule(nn.Linear(4, 1), in_keys=["more"], out_keys=["state_value"])
        actor = ProbabilisticActor(head, ["logits"], distribution_class=Categorical, return_log_prob=True)
        self.actor = TensorDictSequential(self.trunk, actor)
        self.critic = TensorDictSequential(self.trunk, self.memory, value)
        self.policy = TensorDictSequential(self.trunk, actor, self.memory)
        self.gae = GAE(gamma=0.9, lmbda=0.9, value_network=self.critic)
        self.loss = ClipPPOLoss(self.actor, self.critic)

    def batch(self, sequence_length=LENGTH, **options) -> TensorDict:
        """Return the second batch, which begins within episodes and contains the ends of some."""
        env = TensorEnv(MaskedCartPole(9), ROWS, device="cpu")
        env.set_seed(0)
        torch.manual_seed(1)
        options = {"frames_per_batch": ROWS * STEPS, "sequence_length": sequence_length, **options}
        collector = Collector(env, self.policy, **options)
        collector.collect()
        return collector.collect()

    def learned(self, batch, slice_len=LENGTH, deal=SequenceMinibatches.__iter__):
        """Return advantages, and the gradients of each minibatch."""
        self.gae(batch)
        generator = torch.Generator().manual_seed(0)
        data = batch.select(*self.loss.in_keys, strict=False)
        found = [batch["advantage"]]
        for minibatch in deal(SequenceMinibatches(data, 2, slice_len, generator)):
            losses = self.loss.tensors(minibatch)
            total = losses["loss_objective"] + losses["loss_critic"]
            found += torch.autograd.grad(total, [*self.policy.parameters()], allow_unused=True)
        return [value for value in found if value is not None]


@pytest.fixture
def case():
    return Case()


def ordered(minibatches):
    order = minibatches.deal()
    return minibatches.rows(order)


@pytest.mark.parametrize("slice_len", [LENGTH, 2 * LENGTH, None])
@pytest.mark.parametrize("deal", [SequenceMinibatches.__iter__, SequenceMinibatches.entries, ordered])
def test_learning_has_the_bits_of_all_states(case, slice_len, deal):
    if slice_len is None and deal is ordered:
        slice_len = STEPS
    every, starts = case.batch(None), case.batch()
    assert bool((every["next", "done"]).any())
    assert bool((every["recurrent_state_h"][:, 0] != 0).any())
    deal_of_two = case.batch(None)[:2], case.batch()[:2]  # an even number of whole rows
    expected, found = (case.learned(part, slice_len, deal) for part in deal_of_two)
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)
    for key, value in every.exclude(("collector", "traj_ids")).items(True, True):
        if "recurrent_state" not in str(key) and "critic" not in key:
            assert torch.equal(value, starts[key])
    names = {key for key in starts.keys(True, True) if "critic" in key}
    assert names == {("critic", part, leaf) for part in "hc" for leaf in ("every_6", "step")}


def test_states_are_those_of_the_steps_where_sequences_start(case):
    every, starts = case.batch(None), case.batch()
    assert torch.equal(state_in(starts, ("critic", "h"), (1, 4)), every["critic", "h"][:, ::LENGTH])
    assert torch.equal(state_in(every, ("critic", "h"), (1, 4)), every["critic", "h"])
    h = every["recurrent_state_h"]
    assert sparse_values(h) is h
    assert sparse_values(None) is None
    placed = sparse_values(starts["recurrent_state_h"], placed=True)
    assert torch.equal(placed[:, ::LENGTH, :10], h[:, ::LENGTH].flatten(2))
    assert sparse_values(starts["recurrent_state_h"]).shape == (ROWS, STEPS, 2)  # ten numbers over six steps
    assert (
        sum(v.nbytes for k, v in starts.items(True, True) if "every_6" in k) * LENGTH
        < 1.6 * 4 * every["recurrent_state_h"].nbytes
    )


MEMORIES = {
    "lstm": lambda: LSTMModule(2, 4, num_layers=2, in_key="x", out_key="y"),
    "both directions": lambda: LSTMModule(2, 4, bidirectional=True, in_key="x", out_key="y"),
    "gtrxl": lambda: GTrXLModule(2, 4, num_layers=2, window=5, in_key="x", out_key="y"),
    "gtrxl, both directions": lambda: GTrXLModule(2, 4, window=5, bidirectional=True, in_key="x", out_key="y"),
    "gated_deltanet": lambda: GatedDeltaNetModule(2, 4, num_layers=2, in_key="x", out_key="y"),
    "mlstm": lambda: MLSTMModule(2, 4, in_key="x", out_key="y"),
    "mamba2": lambda: Mamba2Module(2, 4, in_key="x", out_key="y"),
    "shm": lambda: SHMModule(2, 4, in_key="x", out_key="y"),
}


def dense_and_sparse(module) -> tuple[TensorDict, TensorDict]:
    """Return a batch that has states at all steps, zeros where no sequence starts, and one without these zeros."""
    size, slots = torch.Size([2, 24]), module.net.num_layers * module.net.num_directions
    first = torch.rand(size) < 0.15
    first[1, LENGTH] = True
    steps = torch.arange(24).repeat(2, 1)
    steps -= torch.where(first, steps, -50).cummax(1).values  # rows begin at the 50th step
    entries = {"x": torch.randn(*size, 2, dtype=torch.float64), "is_init": first.unsqueeze(-1)}
    batch = TensorDict({**entries, ("collector", "traj_steps"): steps}, size)
    dense, sparse = batch.clone(), batch.clone()
    for key, of_layer in zip(module.state_keys, module.net.state_shapes, strict=True):
        shape = torch.Size([slots, *of_layer])
        sparse[key], memory = allocate(size, shape, LENGTH, dtype=torch.float64, device="cpu")
        memory.copy_(torch.rand(memory.shape))
        dense[key] = torch.zeros(*size, *shape, dtype=torch.float64)
        dense[key][:, ::LENGTH] = memory.unflatten(-1, shape)
    return dense, sparse


@pytest.mark.parametrize("backend", ["loop", "scan", "reference"])
@pytest.mark.parametrize("name", MEMORIES)
def test_every_cell_reads_them_where_sequences_start(name: str, backend: str) -> None:
    """Episodes that begin inside of sequences begin from zeros; with and without states after steps."""
    torch.manual_seed(0)
    module = MEMORIES[name]().double()
    module.recurrent_backend = backend
    dense, sparse = dense_and_sparse(module)

    def learned(inputs):
        inputs = Entries.of(inputs)
        with set_recurrent_mode(True):
            features, *after = (module(inputs.copy())[key] for key in module.out_keys)
            inputs.unread = module.out_keys[1:]
            torch.testing.assert_close(module(inputs)["y"], features)
        return [features, *after, *torch.autograd.grad(features.square().sum(), [*module.parameters()])]

    for found, wanted in zip(learned(sparse), learned(dense), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    with set_recurrent_mode(True):
        (_, states), (_, expected) = module.sequences(sparse), module.sequences(dense)
    assert all(torch.equal(state, expected[key]) for key, state in states.items())


class WithoutNumbers(Cell):
    """Has a state that has no numbers."""

    state_names = ("h", "none")

    def parameters(self, sizes):
        return {"weight": (sizes.hidden_size, sizes.input_size)}

    def state_shapes(self, sizes):
        return (sizes.hidden_size,), (0,)

    def step(self, x, states, weight):
        h = (states[0] + nn.functional.linear(x, weight)).tanh()
        return h, (h, states[1])


def test_states_without_numbers() -> None:
    module = CellModule(WithoutNumbers, 2, 4, in_key="x", out_key="y").double()
    dense, _ = dense_and_sparse(MEMORIES["lstm"]().double())
    batch = dense.select("x", "is_init")
    for key, shape in zip(module.state_keys, module.net.state_shapes, strict=True):
        batch[key] = torch.zeros(*batch.shape, 1, *shape, dtype=torch.float64)
    with set_recurrent_mode(True):
        assert module(batch)["y"].shape == (2, 24, 4)


@pytest.mark.parametrize("name", ["lstm", "gtrxl", "gated_deltanet"])
def test_batches_without_rows(name: str) -> None:
    module = MEMORIES[name]().double()
    _, sparse = dense_and_sparse(module)
    with set_recurrent_mode(True):
        assert module(sparse[:0])["y"].shape == (0, 24, 4)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["lstm", "gated_deltanet"])
def test_programs_read_them(name: str) -> None:
    torch.manual_seed(0)
    module = MEMORIES[name]().double()
    module.recurrent_backend = "scan"
    _, sparse = dense_and_sparse(module)
    leaves = [*sparse.keys(True, True)]

    def features(*tensors: torch.Tensor) -> torch.Tensor:
        inputs = Entries({}, sparse.batch_size)
        for key, tensor in zip(leaves, tensors, strict=True):
            inputs.set(key, tensor)
        with set_recurrent_mode(True):
            return module(inputs)["y"]

    tensors = [sparse[key] for key in leaves]
    found = torch.compile(features, fullgraph=True, backend="aot_eager")(*tensors)
    torch.testing.assert_close(found, features(*tensors))


def test_rows_may_be_rearranged_where_sequences_stay_whole(case):
    batch = case.batch()
    rows = batch[[2, 0]]
    parts = batch[:, LENGTH : 3 * LENGTH]
    with torch.no_grad():
        whole = case.gae(batch.clone())["state_value"]
        values = case.gae(rows.clone())["state_value"], case.gae(torch.cat([rows, batch]))["state_value"][2:]
        torch.testing.assert_close(values, (whole[[2, 0]], whole))
        values = case.gae(parts.clone())["state_value"], case.gae(batch.reshape(-1))["state_value"]
        torch.testing.assert_close(values, (whole[:, LENGTH : 3 * LENGTH], whole.reshape(-1, 1)))


def test_groups_write_one_batch(case):
    def batch(sequence_length):
        env = GroupedEnv([GymEnv("recurl/MaskedCartPole-v1", num_envs=2) for _ in range(2)])
        env.set_seed(0)
        torch.manual_seed(1)
        return Collector(env, case.policy, frames_per_batch=4 * 12, sequence_length=sequence_length).collect()

    every, starts = batch(None), batch(4)
    h = state_in(starts, "recurrent_state_h", (2, 5))
    assert torch.equal(h, every["recurrent_state_h"][:, ::4])
    assert bool(h[:, 1:].any())


WRONG_CUTS = {
    "shifted": lambda batch: batch[:, 2 : 2 + 2 * LENGTH],
    "torn rows": lambda batch: batch[:, : 2 * LENGTH + 1],
    "a part of the flat batch": lambda batch: batch.reshape(-1)[3 : 3 + LENGTH],
    "shuffled tokens": lambda batch: batch[:, torch.randperm(STEPS, generator=torch.Generator().manual_seed(0))],
    "other rows": lambda batch: batch.reshape(ROWS * 2, STEPS // 2)[:, 1 : 1 + LENGTH],
}


@pytest.mark.parametrize("cut", WRONG_CUTS.values(), ids=WRONG_CUTS)
def test_a_batch_that_is_cut_elsewhere_is_refused(case, cut):
    batch = cut(case.batch())
    words = (
        r"stored only at the starts of sequences of 6 steps.*(interrupted|its rows have).*Cut it into sequences of 6"
    )
    with pytest.raises(UsageError, match=words):
        case.gae(batch.clone())
    with pytest.raises(UsageError, match=words), set_recurrent_mode(True):
        case.trunk(batch.clone())
    case.gae(all_states := cut(case.batch(None)))
    with pytest.raises(UsageError, match=words):
        case.loss(batch.set("advantage", all_states["advantage"]).set("value_target", all_states["value_target"]))
    with pytest.raises(UsageError, match=r"stored only at the starts .* Cut it into sequences of 6 steps"):
        SequenceMinibatches(batch, 1, LENGTH)


def test_marks_within_a_sequence_are_refused(case):
    batch = case.batch()
    inside = batch["is_init"].clone()
    token = int((batch["collector", "traj_steps"][0] > 0)[1:LENGTH].int().argmax()) + 1
    inside[0, token] = True
    with pytest.raises(
        UsageError, match=f"a sequence begins or is interrupted at token {token}, which is step {token}"
    ):
        case.gae(batch.clone().set("is_init", inside))
    with pytest.raises(UsageError, match=r"can't be checked without \('collector', 'traj_steps'\): keep that entry"):
        case.gae(batch.clone().exclude(("collector", "traj_steps")))


@pytest.mark.parametrize("slice_len", [1, 4, 9, 13])
def test_sequences_of_another_length_are_refused(case, slice_len):
    words = f"rows of 24 steps would be cut into sequences of {slice_len}. Cut it into sequences of 6 steps or a mult"
    with pytest.raises(UsageError, match=words):
        SequenceMinibatches(case.batch(), 2, slice_len)


def test_readers_of_all_states_refuse(case):
    batch = case.batch()
    words = (
        r"needs the states of all steps, but 'recurrent_state_h' is stored only at the starts of sequences of 6 steps"
    )
    for storage in (LazyTensorStorage(100), ListStorage(100)):
        buffer = TensorDictReplayBuffer(storage=storage, sampler=SliceSampler(num_slices=2), batch_size=12)
        with pytest.raises(UsageError, match=f"A replay buffer {words}"):
            buffer.extend(batch.reshape(-1))
    with pytest.raises(UsageError, match=f"check_batch {words}: collect the states of all steps: Collector"):
        check_batch(case.policy, batch)
    with pytest.raises(UsageError, match="can't be run step by step: run whole sequences"):
        case.trunk(batch.clone())
    other = LSTMModule(2, 9, in_key="observation", out_key="memory")
    with (
        pytest.raises(UsageError, match=r"must have 9 numbers, 2 at every step, got \[3, 24, 3\]"),
        set_recurrent_mode(True),
    ):
        TensorDictSequential(other)(batch.clone().set("recurrent_state_h", allocate_other(batch)))


def allocate_other(batch):
    return allocate(batch.batch_size, torch.Size([1, 13]), LENGTH, dtype=torch.float32, device=torch.device("cpu"))[0]


@pytest.mark.parametrize("length", [0, 5, 48])
def test_rows_must_be_whole_sequences(case, length):
    with pytest.raises(ArgumentError, match=f"sequence_length must divide the 24 steps .* got {length}"):
        case.batch(length)


def test_gradients_reach_the_states(case):
    batch = case.batch()
    spread = batch["recurrent_state_h", "every_6"].requires_grad_()
    with set_recurrent_mode(True):
        case.trunk(batch.select(*case.trunk.in_keys, "collector"))["memory"].square().sum().backward()
    assert bool(spread.grad[..., 0].any())
