import pytest
import torch
from tensordict import TensorDict

from recurl.collectors import Collector
from recurl.core import specs
from recurl.core.errors import ArgumentError, ArgumentTypeError, MissingKeyError
from recurl.envs import EnvBase, GymEnv, ParallelEnv, TensorEnv, check_env_specs
from recurl.envs.tasks import MaskedArm
from recurl.transforms import Compose, ObservationDelay, ObservationNoise, StepCounter


class Clock(EnvBase):
    """Two rows observe 10 * row + step; the episodes of a row end after a number of steps of its own."""

    def __init__(self, lengths=(3, 100)):
        spec = specs.Composite({"observation": specs.Unbounded(1), "clean": specs.Unbounded(1)})
        super().__init__(observation_spec=spec, action_spec=specs.Categorical(2), batch_size=[2])
        self._lengths, self._episodes = torch.tensor(lengths), torch.zeros(2, dtype=torch.long)
        self._steps = torch.zeros(2, dtype=torch.long)

    def _observed(self, entries=()):
        now = (1000 * torch.arange(2) + 100 * self._episodes + self._steps).float()[:, None]
        return TensorDict({"observation": now, "clean": now.clone(), **dict(entries)}, [2])

    def _reset(self, tensordict):
        rows = torch.ones(2, dtype=torch.bool) if tensordict is None else tensordict["_reset"].view(2)
        self._episodes = self._episodes + rows.long()
        self._steps = self._steps.masked_fill(rows, 0)
        return self._observed()

    def _step(self, tensordict):
        self._steps = self._steps + 1
        done = (self._steps >= self._lengths)[:, None]
        return self._observed({"reward": torch.zeros(2, 1), "terminated": done, "truncated": torch.zeros_like(done)})

    def _set_seed(self, seed):
        pass


def observed(env, steps, key="observation"):
    batch = env.rollout(steps, break_when_any_done=False)
    return batch[key].squeeze(-1).tolist(), batch["next", key].squeeze(-1).tolist()


def test_a_delay_begins_again_with_the_episode_of_one_row():
    roots, after = observed(Clock().append_transform(ObservationDelay(2)), 7)
    assert roots[0] == [100, 100, 100, 200, 200, 200, 300]
    assert after[0] == [100, 100, 101, 200, 200, 201, 300]
    assert roots[1] == [1100, 1100, 1100, 1101, 1102, 1103, 1104]
    assert after[1] == [1100, 1100, 1101, 1102, 1103, 1104, 1105]
    roots, after = observed(Clock().append_transform(ObservationDelay(1)), 5)
    assert roots[0] == [100, 100, 101, 200, 200]
    assert after[0] == [100, 101, 102, 200, 201]
    assert observed(Clock().append_transform(ObservationDelay(2)), 5, "clean")[0][0] == [100, 101, 102, 200, 201]


def test_each_episode_draws_its_delay_from_a_range():
    torch.manual_seed(0)
    env = Clock((9, 7)).append_transform(ObservationDelay((0, 3)))
    batch = env.rollout(200, break_when_any_done=False)
    delay, time = batch["observation_delay"], batch["clean"] % 100
    assert sorted(delay.unique().tolist()) == [0, 1, 2, 3]
    assert torch.equal(batch["observation"], batch["clean"] - torch.minimum(delay, time))
    last = batch["next", "clean"] % 100
    assert torch.equal(batch["next", "observation"], batch["next", "clean"] - torch.minimum(delay, last))
    same_episode = ~batch["next", "done"][:, :-1]
    assert torch.equal(delay[:, 1:][same_episode], delay[:, :-1][same_episode])


def check_continues(batch, key="observation"):
    done = batch["next", "done"][:, :-1]
    same = (batch[key][:, 1:] == batch["next", key][:, :-1]).flatten(2).all(-1, keepdim=True)
    assert done.any()
    assert torch.equal(same, ~done)


@pytest.mark.parametrize(("distribution", "deviation"), [("normal", 2.0), ("uniform", 2.0 / 3**0.5)])
def test_noise_has_the_scale_and_is_the_same_at_next_and_root(distribution, deviation):
    torch.manual_seed(0)
    env = Clock((50, 33)).append_transform(ObservationNoise(2.0, distribution=distribution))
    batch = env.rollout(2000, break_when_any_done=False)
    check_continues(batch)
    for part in (batch, batch["next"]):
        noise = part["observation"] - part["clean"]
        assert noise.mean().abs() < 0.1
        assert (noise.std() - deviation).abs() < 0.05
        assert distribution == "normal" or noise.abs().max() <= 2.001
    ends = batch["next"][batch["next", "done"].squeeze(-1)]
    assert (ends["observation"] != ends["clean"]).all()


@pytest.mark.parametrize("make", [lambda: GymEnv("recurl/MaskedArm-v0", 3), lambda: TensorEnv(MaskedArm(20), 3)])
@pytest.mark.parametrize("order", [1, -1])
def test_collected_batches_and_seeds(make, order):
    def collected(seed):
        width = torch.linspace(0.0, 1.0, make().observation_spec["observation"].shape[-1])
        parts = [ObservationNoise(width), ObservationDelay((1, 3)), StepCounter(max_steps=20)]
        env = make().append_transform(Compose(*parts[:2][::order], parts[2]))
        check_env_specs(env)
        torch.manual_seed(seed)
        env.set_seed(4)
        collector = Collector(env, frames_per_batch=90)
        batches = [collector.collect() for _ in range(3)]
        return torch.cat(batches, 1)

    first, again, other = collected(0), collected(0), collected(1)
    check_continues(first)
    for key in ("observation", "observation_window", "observation_delay"):
        assert torch.equal(first[key], again[key])
        assert not torch.equal(first[key], other[key])


def test_tensors_are_enough():
    env = TensorEnv(MaskedArm(), 3).append_transform(Compose(ObservationNoise(0.1), ObservationDelay(2)))
    assert env.explain()["tensors"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("shared_interpreter")
def test_workers():
    def make():
        return Clock((3, 4)).append_transform(ObservationDelay(2))

    inside = ParallelEnv(2, make, concatenate=True)
    outside = ParallelEnv(2, lambda: Clock((3, 4)), concatenate=True).append_transform(ObservationDelay(2))
    for env in (inside, outside):
        roots, after = observed(env, 7)
        assert roots[0] == roots[2] == [100, 100, 100, 200, 200, 200, 300]
        assert after[1] == [1100, 1100, 1101, 1102, 1200, 1200, 1201]
        env.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ObservationNoise(-1.0), "scale of noise must be finite and at least 0"),
        (lambda: ObservationNoise(1.0, distribution="beta"), "must be one of .*'normal', 'uniform'"),
        (lambda: ObservationNoise(1.0, []), "needs at least one entry"),
        (lambda: ObservationNoise(1.0, ["seen"]), "'seen' is none; they are .*observation"),
        (lambda: ObservationNoise(torch.ones(3)), "must broadcast to each entry"),
        (lambda: ObservationDelay(0), "at least 1 step"),
        (lambda: ObservationDelay((3, 2)), "at least 1 step"),
        (lambda: ObservationDelay(1, []), "needs at least one entry"),
        (lambda: ObservationDelay(1, ["seen"]), "'seen' is none"),
        (lambda: Compose(ObservationDelay(1), ObservationDelay(2)), "delayed already"),
    ],
)
def test_what_does_not_fit(make, message):
    with pytest.raises(ArgumentError, match=message):
        Clock().append_transform(make())


def test_what_can_not_be_delayed_or_be_noisy():
    with pytest.raises(ArgumentError, match="floating-point entries, but 'step_count' is torch"):
        Clock().append_transform(Compose(StepCounter(), ObservationNoise(1.0, ["step_count"])))
    for steps in (1.5, (1, 2, 3)):
        with pytest.raises(ArgumentTypeError, match="a number of steps or a pair"):
            ObservationDelay(steps)
    with pytest.raises(ArgumentTypeError, match="write \\['observation'\\]"):
        ObservationDelay(1, "observation")
    env = Clock().append_transform(ObservationDelay(1))
    with pytest.raises(MissingKeyError, match="lacks 'observation_window'"):
        env.step(env.rand_action(env.reset().exclude("observation_window")))
