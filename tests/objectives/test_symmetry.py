"""Symmetry loss, and the states of mirrored episodes that it starts from."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError, UnsupportedError, UsageError
from recurl.core.specs import Binary, Bounded, Composite, Unbounded
from recurl.core.specs import Categorical as Choice
from recurl.data import SequenceMinibatches
from recurl.envs import GymEnv
from recurl.envs.tasks import ARM_MIRROR, CARTPOLE_MIRROR, MaskedArm, MaskedCartPole
from recurl.envs.tasks.dynamics import parts
from recurl.envs.tasks.namespaces import HOST, RowDraw
from recurl.modules import (
    Categorical,
    GRUModule,
    LSTMModule,
    NormalParamExtractor,
    ProbabilisticActor,
    TanhNormal,
)
from recurl.objectives import MirroredStates, SignedPermutation, Symmetry, SymmetryLoss
from recurl.objectives.symmetry import mirrored_key
from recurl.sequences.start_states import state_in

PENDULUM = Symmetry({"observation": SignedPermutation([1, -1])}, action=torch.neg)


class Difference(nn.Module):
    """Odd function of two memories: swapping them negates it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 6))

    def forward(self, one, other):
        loc = (one - other) @ self.weight.T
        return loc, torch.full_like(loc, 0.3)


def symmetric_actor():
    """Policy of the pendulum that is symmetric, though its states aren't: mirroring swaps its two memories."""
    torch.manual_seed(0)
    grus = [
        GRUModule(2, 6, in_keys=[f"in{name}", f"state{name}"], out_keys=[f"out{name}", ("next", f"state{name}")])
        for name in "ab"
    ]
    grus[1].load_state_dict(grus[0].state_dict())
    flip = TensorDictModule(lambda x: (x, PENDULUM.transform("observation", x)), ["observation"], ["ina", "inb"])
    head = TensorDictModule(Difference(), ["outa", "outb"], ["loc", "scale"])
    return ProbabilisticActor(
        TensorDictSequential(flip, *grus, head),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )


def pendulum(rows=3, steps=11):
    return GymEnv("recurl/MaskedPendulum-v1", rows, max_episode_steps=steps)


def plain_actor(features=2, kind=LSTMModule, size=5):
    torch.manual_seed(1)
    memory = kind(features, size, in_key="observation", out_key="features")
    head = nn.Sequential(nn.Linear(size, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictSequential(memory, TensorDictModule(head, ["features"], ["loc", "scale"])),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )


@pytest.mark.parametrize(("length", "steps"), [(4, 8), (3, 8), (5, 10)])
def test_a_symmetric_policy_has_no_loss_across_batches_and_resets(length, steps):
    actor, env = symmetric_actor(), pendulum()
    states = MirroredStates(actor, [PENDULUM], sequence_length=length)
    loss = SymmetryLoss(actor, [PENDULUM], env.action_spec_unbatched)
    resets = 0
    for batch in Collector(env, actor, frames_per_batch=3 * steps, total_frames=3 * 4 * steps):
        resets += int(batch["is_init"][:, 1:].sum())
        states(batch)
        for sequence in range(0, steps, length):  # the memories have changed places
            swapped = state_in(batch, mirrored_key(0, "statea"), (1, 6))
            swapped = swapped[:, sequence * swapped.shape[1] // steps]
            torch.testing.assert_close(swapped, batch["stateb"][:, sequence], rtol=0, atol=1e-6)
        assert batch["statea"].sub(batch["stateb"]).abs().max() > 0.05
        assert loss(batch)["asymmetry"] < 1e-12
        minibatches = SequenceMinibatches(batch.select(*loss.in_keys), 3, length)
        dealt = [*minibatches.entries(), *([] if steps % length else minibatches.rows(torch.randperm(6)))]
        assert all(loss.tensors(minibatch)["asymmetry"] < 1e-12 for minibatch in dealt)
    assert resets


def test_without_the_carried_states_the_loss_of_a_symmetric_policy_would_not_be_zero():
    actor = symmetric_actor()
    env = pendulum(steps=100)
    states, loss = MirroredStates(actor, [PENDULUM]), SymmetryLoss(actor, [PENDULUM], env.action_spec_unbatched)
    for batch in Collector(env, actor, frames_per_batch=3 * 8, total_frames=3 * 16):
        states(batch)
    for name in ("statea", "stateb"):
        batch[(*mirrored_key(0, name), "every_8")].zero_()
    assert loss(batch)["asymmetry"] > 1e-5


def test_the_loss_is_that_of_a_second_walk_in_float64():
    actor, env = plain_actor(), pendulum(rows=2, steps=7)
    half, more = Symmetry({"observation": torch.neg}), PENDULUM
    states = MirroredStates(actor, [half, more])
    loss = SymmetryLoss(actor, [half, more], env.action_spec_unbatched, coeff=3.0)
    collector = Collector(env, actor, frames_per_batch=2 * 5, total_frames=2 * 15)
    observed, flags, found = [], [], []
    for batch in collector:
        states(batch)
        found.append(loss(batch))
        observed.append(batch["observation"].double())
        flags.append(batch["is_init"][..., 0])
    whole, begins = torch.cat(observed, 1), torch.cat(flags, 1)
    torch.manual_seed(0)
    lstm, linear = actor.module[0][0].lstm, actor.module[0][1].module[0]
    weights = [w.detach().double() for w in lstm.parameters()]
    cell = nn.LSTMCell(2, 5).double()
    for own, weight in zip(cell.parameters(), weights, strict=True):
        own.data.copy_(weight)

    def walk(x):
        h = c = torch.zeros(2, 5, dtype=torch.float64)
        means = []
        for t in range(x.shape[1]):
            keep = (~begins[:, t, None]).double()
            h, c = cell(x[:, t], (h * keep, c * keep))
            loc = h @ linear.weight[:1].detach().double().T + linear.bias[:1].detach().double()
            means.append(2 * torch.tanh(loc))
        return torch.stack(means, 1)

    original = walk(whole)
    pieces = [walk(-whole) - original, walk(whole * torch.tensor([1.0, -1.0])) + original]
    for number, losses in enumerate(found):
        part = slice(5 * number, 5 * number + 5)
        wanted = torch.stack([((piece[:, part]) / 2).square().mean() for piece in pieces]).mean()
        torch.testing.assert_close(losses["asymmetry"].double(), wanted, rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(losses["loss_symmetry"].detach(), 3 * losses["asymmetry"])


def test_choices_are_compared_by_the_divergence_of_their_probabilities():
    torch.manual_seed(0)
    net = TensorDictModule(nn.Linear(2, 3), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        net, in_keys={"logits": "logits", "mask": "action_mask"}, distribution_class=Categorical, return_log_prob=True
    )
    turn = Symmetry({"observation": torch.neg}, action=SignedPermutation([1, 1, 1], order=[2, 1, 0]))
    loss = SymmetryLoss(actor, [turn], Choice(3))
    batch = TensorDict(
        {"observation": torch.randn(4, 6, 2), "action_mask": torch.ones(4, 6, 3, dtype=torch.bool)}, [4, 6]
    )
    batch["action_mask"][0, :, 0] = False

    def probabilities(x, mask):
        return net.module(x).masked_fill(~mask, -torch.inf).softmax(-1)

    original = probabilities(batch["observation"], batch["action_mask"]).flip(-1)
    mirrored = probabilities(-batch["observation"], batch["action_mask"].flip(-1))
    wanted = torch.where(original > 0, original * (original.log() - mirrored.log()), 0.0).sum(-1).mean()
    found = loss(batch)
    torch.testing.assert_close(found["asymmetry"], wanted.detach())
    found["loss_symmetry"].backward()
    assert net.module.weight.grad.isfinite().all()
    assert net.module.weight.grad.abs().max() > 0


def test_the_mirror_image_has_no_gradient():
    actor, env = plain_actor(), pendulum()
    states, loss = MirroredStates(actor, [PENDULUM]), SymmetryLoss(actor, [PENDULUM], env.action_spec_unbatched)
    batch = states(next(iter(Collector(env, actor, frames_per_batch=24, total_frames=24))))
    frozen = {key: batch[key].clone() for key in batch.keys(True, True)}
    loss.gradients(batch)
    assert all(torch.equal(batch[key], value) for key, value in frozen.items())
    gradient = [parameter.grad.clone() for parameter in loss.parameters()]
    epsilon, (*_, bias) = 1e-3, actor.parameters()
    image = loss._image
    kept = []
    loss._image = lambda *arguments: kept.append(image(*arguments)) or kept[-1]
    loss(batch)
    loss._image = lambda *arguments: kept[0]
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            bias[0] += sign * epsilon
            ends.append(loss(batch)["asymmetry"].item())
            bias[0] -= sign * epsilon
    assert (ends[0] - ends[1]) / (2 * epsilon) == pytest.approx(gradient[-1][0].item(), rel=0.02)


def test_batches_must_follow_each_other():
    actor, env = plain_actor(), pendulum(steps=100)
    batches = list(Collector(env, actor, frames_per_batch=24, total_frames=72))
    with pytest.raises(UsageError, match="first batch must begin where episodes begin"):
        MirroredStates(actor, [PENDULUM])(batches[1])
    states = MirroredStates(actor, [PENDULUM])
    states(batches[0])
    with pytest.raises(UsageError, match="must go on where the last one ended"):
        states(batches[2])
    with pytest.raises(UsageError, match="must have the rows of the last one"):
        states(batches[1][:2])
    states(batches[1])
    again = MirroredStates(actor, [PENDULUM])
    again(batches[0])
    copy = MirroredStates(actor, [PENDULUM])
    copy.load_state_dict(again.state_dict())
    other = copy(batches[1].exclude(("collector", "mirrored")))
    key = mirrored_key(0, "recurrent_state_h")
    assert (other[key] == batches[1][key]).all()
    with pytest.raises(UsageError, match="must be cut there"):
        list(SequenceMinibatches(batches[1], 2, 3))
    with pytest.raises(ArgumentError, match="must be those of 2 symmetries with 2 states each, got"):
        MirroredStates(actor, [PENDULUM] * 2).load_state_dict(again.state_dict())
    with pytest.raises(MissingKeyError, match="Call MirroredStates"):
        SymmetryLoss(actor, [PENDULUM], env.action_spec_unbatched)(batches[2])


def test_symmetries_are_checked():
    actor, observed = plain_actor(), Composite({"observation": Unbounded(4, 2)}, shape=[4])
    real = Bounded(-1.0, 1.0, (2,))
    with pytest.raises(ArgumentError, match=r"transforms 'speed', but the observations are \['observation'\]"):
        Symmetry({"speed": torch.neg}).check(observed, real)
    with pytest.raises(ArgumentError, match="keep shape and dtype of 'observation'"):
        Symmetry({"observation": lambda x: x[..., :1]}).check(observed, real)
    with pytest.raises(ArgumentError, match=r"takes values \[..., 3\], got \[2, 2\]"):
        Symmetry({"observation": SignedPermutation([1, 1, 1])}).check(observed, real)
    with pytest.raises(ArgumentError, match="keep shape and dtype of 'action'"):
        Symmetry({}, action=torch.sum).check(observed, real)
    with pytest.raises(ArgumentError, match="must map the range of actions to itself"):
        Symmetry({}, action=torch.neg).check(observed, Bounded(-1.0, 2.0, (2,)))
    with pytest.raises(ArgumentError, match="must permute the 2 choices"):
        Symmetry({}, action=torch.neg).check(observed, Choice(2))
    with pytest.raises(UnsupportedError, match="one choice or a tensor of real numbers"):
        Symmetry({}).check(observed, Binary((2,)))
    with pytest.raises(ArgumentTypeError, match=r"takes transformations, .* got \[1, -1\]"):
        Symmetry({"observation": [1, -1]})
    with pytest.raises(ArgumentError, match="Signs must be 1 or -1"):
        SignedPermutation([1, -0.5])
    with pytest.raises(ArgumentError, match="must be a permutation of 0 to 1"):
        SignedPermutation([1, 1], order=[0, 0])
    with pytest.raises(ArgumentError, match="need a dtype with negative numbers"):
        SignedPermutation([1, -1])(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(ArgumentError, match="must transform an entry that the policy reads"):
        SymmetryLoss(actor, [Symmetry({"speed": torch.neg})], real)
    with pytest.raises(ArgumentError, match="There must be a symmetry"):
        SymmetryLoss(actor, [], real)
    with pytest.raises(ArgumentTypeError, match="objects of the class Symmetry, got function"):
        SymmetryLoss(actor, [torch.nn.functional.relu], real)
    with pytest.raises(ArgumentError, match="coeff must be at least 0"):
        SymmetryLoss(actor, [PENDULUM], real, coeff=-1.0)


def flipped_arm(state):
    shoulder, elbow, *speeds = state["motion"]
    motion = np.stack((np.pi - shoulder, -elbow, *(-speed for speed in speeds)))
    return {**state, "motion": motion, "target": state["target"] * np.array([[-1.0], [1.0]])}


@pytest.mark.parametrize(
    ("task", "mirror", "flip", "actions"),
    [
        (MaskedArm(), ARM_MIRROR, flipped_arm, (4, 2)),
        (MaskedArm(gravity=True), ARM_MIRROR, flipped_arm, (4, 2)),
        (MaskedCartPole(), CARTPOLE_MIRROR, lambda state: {"physical": -state["physical"]}, None),
    ],
)
def test_the_mirrors_of_tasks_are_symmetries(task, mirror, flip, actions):
    random = np.random.default_rng(0)
    state = task.begin(HOST, RowDraw([np.random.default_rng(seed) for seed in range(4)]))
    other, steps = flip(state), np.zeros(4, dtype=np.int64)
    for _ in range(20):
        one, two = task.observe(HOST, state, steps), task.observe(HOST, other, steps)
        for name, value in parts(one).items():
            image = mirror.transform(name or "observation", torch.from_numpy(value))
            np.testing.assert_allclose(image, parts(two)[name], atol=1e-5)
        if actions is None:
            action = random.integers(0, 2, 4)
            image = mirror.action(torch.eye(2)[action]).argmax(-1).numpy()
        else:
            action = random.uniform(-1, 1, actions).astype(np.float32)
            image = mirror.action(torch.from_numpy(action)).numpy()
        (state, *ends), (other, *others) = (
            task.advance(HOST, state, steps, action),
            task.advance(HOST, other, steps, image),
        )
        for end, wanted in zip(ends, others, strict=True):
            np.testing.assert_allclose(end, wanted, atol=1e-8)
