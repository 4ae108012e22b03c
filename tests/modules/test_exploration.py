import numpy as np
import pytest
import torch
from tensordict import TensorDict

from recurl.core.errors import ArgumentError, MissingKeyError
from recurl.core.specs import Bounded, Categorical, Composite, OneHot, Unbounded
from recurl.modules import AdditiveGaussianModule, EGreedyModule
from recurl.sequences.mode import ExplorationType, set_exploration_type

N = 20_000


def actions(one_hot, choice=2, n=4):
    action = torch.full((N,), choice)
    return TensorDict({"action": torch.nn.functional.one_hot(action, n) if one_hot else action}, [N])


@pytest.mark.parametrize(
    "spec", [Categorical(4), OneHot(4), Categorical(4, (N,)), OneHot(4, (N, 4)), Composite(action=OneHot(4))]
)
def test_statistics(spec):
    """P(greedy) = 1 - eps + eps / n, P(any other) = eps / n: within four standard errors."""
    torch.manual_seed(0)
    one_hot = not isinstance(spec, Categorical)
    td = EGreedyModule(spec, eps_init=0.4)(actions(one_hot))
    action = td["action"].argmax(-1) if one_hot else td["action"]
    assert td["action"].dtype == torch.int64
    if one_hot:
        assert (td["action"].sum(-1) == 1).all()
    expected = torch.tensor([0.1, 0.1, 0.7, 0.1])
    error = torch.sqrt(expected * (1 - expected) / N)
    found = torch.bincount(action, minlength=4) / N
    assert ((found - expected).abs() < 4 * error).all()


@pytest.mark.parametrize(("kind", "explores"), [("RANDOM", True), ("DETERMINISTIC", False), ("MODE", False)])
def test_exploration_type(kind, explores):
    with set_exploration_type(ExplorationType[kind]):
        td = EGreedyModule(Categorical(4))(actions(False))
    assert (td["action"] != 2).any().item() is explores


def test_annealing_and_saved_state():
    module = EGreedyModule(Categorical(2), eps_init=0.9, eps_end=0.1, annealing_num_steps=80)
    module.step()
    assert module.eps.item() == pytest.approx(0.89)
    module.step(39)
    assert module.eps.item() == pytest.approx(0.5)
    other = EGreedyModule(Categorical(2))
    other.load_state_dict(module.state_dict())
    assert other.eps.item() == pytest.approx(0.5)
    module.step(1000)
    assert module.eps.item() == pytest.approx(0.1)


MODULES = [(EGreedyModule, Categorical(2), "eps"), (AdditiveGaussianModule, Bounded(-1.0, 1.0, (1,)), "sigma")]


@pytest.mark.parametrize(("kind", "spec", "amount"), MODULES)
@pytest.mark.parametrize(
    ("total", "frames", "already"),
    [(100_000_000, 1, 50_000_000), (10_000_000, 1, 0), (50_000_000, 4, 49_990_000), (2**40, 64, 2**39 + 1)],
)
def test_annealing_is_exact_however_long(kind, spec, amount, total, frames, already):
    """2,000 steps from any point of any schedule end at the value computed from the step count in float64."""
    module = kind(spec, 1.0, 0.1, total)
    module.step(already)
    for _ in range(2000):
        module.step(frames)
    count = already + 2000 * frames
    assert getattr(module, amount).item() == torch.tensor(1.0 - 0.9 * count / total).item()
    module.step(total)
    assert getattr(module, amount).item() == torch.tensor(0.1).item()


@pytest.mark.parametrize(("kind", "spec", "amount"), MODULES)
def test_annealing_continues_from_an_amount_that_was_set_or_saved_by_an_earlier_version(kind, spec, amount):
    module = kind(spec, 0.9, 0.1, 80)
    module.step(10)
    getattr(module, amount).fill_(0.5)
    module.step(20)
    assert getattr(module, amount).item() == pytest.approx(0.3)
    state = {
        key: value for key, value in module.state_dict().items() if key in (amount, f"{amount}_init", f"{amount}_end")
    }
    for other in (kind(spec), kind(spec, 0.9, 0.1, 80)):
        other.step(3)
        other.load_state_dict(dict(state))
        other.step(10)
        expected = 0.3 - 0.8 * 10 / other.annealing_num_steps
        assert getattr(other, amount).item() == pytest.approx(expected)
    assert len(state) == 3
    fixed = kind(spec, 0.1, 0.1, 80)
    getattr(fixed, amount).fill_(0.3)
    fixed.step(5)
    assert getattr(fixed, amount).item() == pytest.approx(0.3)


@pytest.mark.parametrize(("kind", "spec", "amount"), MODULES)
def test_annealing_resumes_bit_for_bit(kind, spec, amount):
    module, other = kind(spec, 1.0, 0.1, 777), kind(spec, 1.0, 0.1, 777)
    for _ in range(50):
        module.step(7)
        other.load_state_dict(module.state_dict())
        other.step(3)
        module.step(3)
        assert getattr(other, amount) == getattr(module, amount)
    assert module.frames == 500


def test_frames_are_whole():
    with pytest.raises(
        ArgumentError, match=r"frames counts environment steps and must be a non-negative integer, got 0\.5"
    ):
        EGreedyModule(Categorical(2)).step(0.5)


def test_zero_never_explores_and_one_always():
    td = actions(False)
    assert torch.equal(EGreedyModule(Categorical(4), 0.0, 0.0)(td.clone())["action"], td["action"])
    assert (EGreedyModule(Categorical(1), 1.0, 1.0)(td)["action"] == 0).all()


def test_nested_key():
    td = TensorDict({"agent": {"move": torch.full((N,), 3)}}, [N])
    module = EGreedyModule(Categorical(4), action_key=("agent", "move"))
    assert module(td)["agent", "move"].unique().tolist() == [0, 1, 2, 3]


def test_invalid_arguments():
    for options in ({"eps_init": 1.5}, {"eps_init": 0.1, "eps_end": 0.2}, {"eps_end": -0.1}):
        with pytest.raises(ArgumentError, match="0 <= eps_end <= eps_init <= 1"):
            EGreedyModule(Categorical(2), **options)
    with pytest.raises(ArgumentError, match="annealing_num_steps must be positive"):
        EGreedyModule(Categorical(2), annealing_num_steps=0)
    with pytest.raises(ArgumentError, match="must be OneHot or Categorical"):
        EGreedyModule(Unbounded(2))
    with pytest.raises(ArgumentError, match=r"have shape \[20000, 4\], got \[20000\]"):
        EGreedyModule(OneHot(4))(actions(False))
    with pytest.raises(MissingKeyError, match="no 'action' to change: put the policy before the EG"):
        EGreedyModule(Categorical(2))(TensorDict({}, [3]))


BOX = Bounded(torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0]), (2,))


def test_noise_is_normal_in_halves_of_the_range():
    torch.manual_seed(0)
    td = TensorDict({"action": torch.tensor([[0.0, 0.5]]).expand(N, 2).clone()}, [N])
    noisy = AdditiveGaussianModule(BOX, sigma_init=0.2)(td)["action"]
    torch.testing.assert_close(noisy.mean(0), torch.tensor([0.0, 0.5]), atol=0.02, rtol=0)
    torch.testing.assert_close(noisy.std(0), torch.tensor([0.4, 0.1]), atol=0.0, rtol=0.03)


@pytest.mark.parametrize(("kind", "explores"), [("RANDOM", True), ("DETERMINISTIC", False), ("MODE", False)])
def test_noise_stays_within_the_bounds_and_out_of_evaluation(kind, explores):
    td = TensorDict({"action": torch.zeros(100, 2)}, [100])
    with set_exploration_type(ExplorationType[kind]):
        action = AdditiveGaussianModule(Composite(action=BOX), sigma_init=5.0)(td)["action"]
    assert (action != 0).any().item() is explores
    assert (action >= BOX.low).all()
    assert (action <= BOX.high).all()


def test_noise_falls_and_is_saved():
    module = AdditiveGaussianModule(BOX, sigma_init=0.9, sigma_end=0.1, annealing_num_steps=80)
    module.step(40)
    other = AdditiveGaussianModule(BOX)
    other.load_state_dict(module.state_dict())
    assert other.sigma.item() == pytest.approx(0.5)
    module.step(1000)
    assert module.sigma.item() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((BOX, 0.1, 0.2), r"0 <= sigma_end <= sigma_init must hold, got sigma_end=0.2 and sigma_init=0.1"),
        ((BOX, 1.0, 0.1, 0), "annealing_num_steps must be positive, got 0"),
        ((Categorical(3),), "The action spec must be Bounded, with two finite bounds, .* got Categorical"),
        ((Unbounded(3),), "The action spec must be Bounded"),
        ((Bounded(-2e38, 2e38, (1,)),), "with two finite bounds, high - low finite"),
    ],
)
def test_invalid_arguments_of_noise(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        AdditiveGaussianModule(*arguments)


def test_noise_needs_an_action():
    with pytest.raises(MissingKeyError, match="There is no 'action' to change: put the policy before the Additive"):
        AdditiveGaussianModule(BOX)(TensorDict({"x": torch.zeros(1)}, [1]))


@pytest.mark.parametrize(("init", "end"), [(1, 0), (1, 0.05), (1.0, 0)])
def test_integers_are_amounts_too(init, end):
    explore = EGreedyModule(Categorical(3), init, end, annealing_num_steps=100)
    explore.step(50)
    assert explore.eps.item() == pytest.approx((init + end) / 2)


def test_counts_of_any_size():
    explore = EGreedyModule(Categorical(3), 1.0, 0.25, annealing_num_steps=100)
    for frames in (2**62, 2**62, 10**20):
        explore.step(frames)
        assert explore.eps.item() == 0.25
    for frames in (-1, 1.0, np.float32(1), torch.tensor(1.0)):
        with pytest.raises(ArgumentError, match="must be a non-negative integer"):
            explore.step(frames)
