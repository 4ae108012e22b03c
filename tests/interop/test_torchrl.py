"""Recurrent modules of recurl and of TorchRL are interchangeable in TorchRL programs, and so are batches."""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
import torchrl.objectives
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TensorDictPrimer, TransformedEnv
from torchrl.modules import get_primers_from_module
from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate
from torchrl.objectives.value import GAE

import recurl.collectors
import recurl.data
import recurl.envs
import recurl.objectives
import recurl.objectives.value
from recurl.core.errors import ArgumentError, MissingDependencyError
from recurl.modules import set_recurrent_mode
from recurl.modules.interop import for_torchrl
from tests.interop.pairs import RECURL, TORCHRL, actor_and_critic, gradients, pendulum, recurrent

BACKENDS = ["pad", "loop", "cpu"]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


OFF_POLICY = {
    "DDPGLoss": {},
    "TD3Loss": {"bounds": (-2.0, 2.0)},
    "SACLoss": {"target_entropy": -1.0},
    "IQLLoss": {},
    "CQLLoss": {"target_entropy": -1.0, "action_spec": Bounded(-2, 2, (1,))},
}


def outcome(loss: Any, batch: TensorDictBase) -> list[Any]:
    """Return losses and gradients; some losses estimate entropies from samples."""
    torch.manual_seed(2)
    losses = loss(batch)
    sum(value for key, value in losses.items() if key.startswith("loss")).backward()
    return [losses.detach().to_dict(), gradients(loss)]


def collect(library: ModuleType, heads: ModuleType = TORCHRL, **options: Any) -> tuple[Any, Any, TensorDictBase]:
    """Return actor, critic, and a batch ``[40]`` from TorchRL's collector, which wires the actor automatically."""
    actor, critic = actor_and_critic(library, heads, **options)
    if library is RECURL:
        for_torchrl(actor)
    torch.manual_seed(1)
    collector = Collector(pendulum(), actor, frames_per_batch=40, total_frames=40, auto_register_policy_transforms=True)
    (batch,) = list(collector)
    return actor, critic, batch


class TestStateDicts:
    @pytest.mark.parametrize("kind", ["LSTMModule", "GRUModule"])
    @pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bias": False}, {"python_based": True}], ids=str)
    @pytest.mark.parametrize("direction", [(TORCHRL, RECURL), (RECURL, TORCHRL)], ids=["from torchrl", "to torchrl"])
    def test_outputs_are_the_same_bits(
        self, kind: str, options: dict[str, Any], direction: tuple[ModuleType, ModuleType]
    ) -> None:
        source, target = (
            getattr(library, kind)(3, 8, in_key="observation", out_key="memory", **options) for library in direction
        )
        target.load_state_dict(source.state_dict())
        assert list(target.state_dict()) == list(source.state_dict())
        batch = TensorDict({"observation": torch.randn(2, 6, 3), "is_init": torch.zeros(2, 6, 1).bool()}, [2, 6])
        with set_recurrent_mode(True), torch.no_grad():
            sequences = [module(batch.clone())["memory"] for module in (source, target)]
        with torch.no_grad():
            steps = [module(batch[:, 0].clone())["memory"] for module in (source, target)]
        if options.get("python_based"):  # two step loops in Python: the same operations in another order
            torch.testing.assert_close(sequences[0], sequences[1])
        else:
            assert torch.equal(*sequences)
        torch.testing.assert_close(*steps)


class TestCollector:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_batch_is_that_of_torchrls_module(self, backend: str) -> None:
        *_, expected = collect(TORCHRL)
        *_, batch = collect(RECURL, recurrent_backend=backend)
        assert set(batch.keys(True, True)) == set(expected.keys(True, True))
        torch.testing.assert_close(batch.to_dict(), expected.to_dict(), **TOLERANCE)
        assert batch["memory_h"].abs().sum() > 0
        assert batch["is_init"].sum() == 4

    def test_primers_can_be_appended_by_hand_inside_and_outside_a_batched_environment(self) -> None:
        actor = for_torchrl(actor_and_critic(RECURL)[0])

        def primer() -> Any:
            return get_primers_from_module(actor)

        def one() -> TransformedEnv:
            return TransformedEnv(GymEnv("Pendulum-v1"), InitTracker()).append_transform(primer())

        inside = SerialEnv(2, one)
        outside = TransformedEnv(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), InitTracker()).append_transform(primer())
        for env in (inside, outside):
            batch = env.rollout(5, actor)
            assert batch["memory_h"].shape == (2, 5, 1, 8)
            assert torch.equal(batch["memory_h"][:, 1:], batch["next", "memory_h"][:, :-1])
            assert batch["memory_h"][:, 1:].abs().sum() > 0

    def test_for_torchrl_survives_pickling(self) -> None:
        actor = pickle.loads(pickle.dumps(for_torchrl(actor_and_critic(RECURL)[0])))
        assert isinstance(get_primers_from_module(actor), TensorDictPrimer)

    def test_without_for_torchrl_the_error_names_it(self) -> None:
        env = TransformedEnv(GymEnv("Pendulum-v1"), InitTracker())
        module = recurrent(RECURL, "memory")
        with pytest.raises(RuntimeError, match=r"recurl\.modules\.interop\.for_torchrl") as caught:  # noqa: PT012 - both
            env = env.append_transform(module.make_tensordict_primer())
            env.reset()
        assert "recurl.envs" in str(caught.value)

    def test_an_environment_of_recurl_refuses_torchrls_primer(self) -> None:
        env = recurl.envs.GymEnv("Pendulum-v1")
        with pytest.raises(
            TypeError, match=r"A Transform instance is required, got an instance of torchrl\..*for_torchrl"
        ):
            env.append_transform(for_torchrl(recurrent(RECURL, "memory")).make_tensordict_primer())

    def test_a_module_without_memory_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match="LSTMModule or GRUModule of recurl"):
            for_torchrl(nn.Linear(1, 1))

    def test_torchrl_must_be_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "torchrl.envs", None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'recurl\[torchrl\]'"):
            for_torchrl(recurrent(RECURL, "memory"))


class TestLosses:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_ppo_and_gae(self, backend: str) -> None:
        """Compare advantages, losses and gradients of TorchRL's GAE and loss; no mode is set for the loss."""
        found = []
        for library, options in ((TORCHRL, {}), (RECURL, {"recurrent_backend": backend})):
            actor, critic, batch = collect(library, **options)
            gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=True)
            with set_recurrent_mode(True):
                batch = gae(batch)
            loss = ClipPPOLoss(actor, critic)
            torch.manual_seed(2)  # it estimates entropies from samples
            losses = loss(batch)
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            assert abs(losses["kl_approx"]) < 1e-6
            found.append([batch["advantage"], losses.detach().to_dict(), gradients(loss)])
        torch.testing.assert_close(found[1], found[0], **TOLERANCE)

    @pytest.mark.parametrize("backend", ["loop", "cpu"])
    def test_gae_with_vmap(self, backend: str) -> None:
        """Vmap is TorchRL's default, although its recurrent modules don't support it."""
        _, critic, batch = collect(RECURL, recurrent_backend=backend)
        values = []
        for deactivate_vmap in (True, False):
            gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=deactivate_vmap)
            with set_recurrent_mode(True):
                values.append(gae(batch.clone())["advantage"])
        torch.testing.assert_close(*values)

    @pytest.mark.parametrize("name", ["PPOLoss", "KLPENPPOLoss", "A2CLoss", "ReinforceLoss"])
    def test_other_losses_of_an_actor_and_a_critic(self, name: str) -> None:
        found = []
        for library in (TORCHRL, RECURL):
            actor, critic, batch = collect(library)
            with set_recurrent_mode(True):
                batch = GAE(gamma=0.99, lmbda=0.95, value_network=critic, deactivate_vmap=True)(batch)
            found.append(outcome(getattr(torchrl.objectives, name)(actor, critic), batch))
        torch.testing.assert_close(found[1], found[0], **TOLERANCE)

    @pytest.mark.parametrize(("name", "options"), OFF_POLICY.items())
    def test_off_policy_losses_of_a_recurrent_actor(self, name: str, options: dict[str, Any]) -> None:
        found = []
        for library in (TORCHRL, RECURL):
            actor, critic, batch = collect(library, **({"recurrent_backend": "loop"} if library is RECURL else {}))
            torch.manual_seed(5)
            both = TensorDictModule(
                lambda o, a: torch.cat([o, a], -1), in_keys=["observation", "action"], out_keys=["both"]
            )
            worth = TensorDictModule(nn.Linear(4, 1), in_keys=["both"], out_keys=["state_action_value"])
            networks = [actor, TensorDictSequential(both, worth), *([critic] if name == "IQLLoss" else [])]
            loss = getattr(torchrl.objectives, name)(*networks, **options)
            loss.make_value_estimator(gamma=0.9)
            SoftUpdate(loss, eps=0.9)
            found.append(outcome(loss, batch))
        torch.testing.assert_close(found[1], found[0], **TOLERANCE)

    def test_dqn(self) -> None:
        """Double Q-learning with target networks, on a batch from TorchRL's collector."""
        found = []
        for library in (TORCHRL, RECURL):
            torch.manual_seed(0)
            memory = recurrent(library, "memory")
            if library is RECURL:
                for_torchrl(memory)
            head = TensorDictModule(nn.Linear(8, 4), in_keys=["memory"], out_keys=["action_value"])
            policy = TensorDictSequential(memory, head, TORCHRL.QValueModule(action_space="one-hot"))
            explorer = TensorDictSequential(memory)
            torch.manual_seed(1)
            (batch,) = list(
                Collector(
                    pendulum(), _with_random_action(explorer), frames_per_batch=20, total_frames=20,
                    auto_register_policy_transforms=True,
                )
            )  # fmt: skip
            torch.manual_seed(2)
            batch["action"] = nn.functional.one_hot(torch.randint(4, (20,)), 4)
            loss = DQNLoss(policy, action_space="one-hot", double_dqn=True, delay_value=True)
            loss.make_value_estimator(gamma=0.9)
            SoftUpdate(loss, eps=0.9)
            value = loss(batch)["loss"]
            value.backward()
            found.append([value.detach(), gradients(loss)])
        assert len(found[1][1]) == 6
        torch.testing.assert_close(found[1], found[0], **TOLERANCE)


def _with_random_action(module: TensorDictSequential) -> TensorDictSequential:
    draw = TensorDictModule(lambda memory: torch.rand_like(memory[..., :1]), in_keys=["memory"], out_keys=["action"])
    return TensorDictSequential(module, draw)


class TestBatches:
    def collected(self) -> tuple[Any, Any, TensorDictBase]:
        """Return actor, critic, and a batch ``[2, 20]`` from recurl's collector, with the states of both."""
        actor, critic = actor_and_critic(RECURL, heads=RECURL)
        torch.manual_seed(1)
        env = recurl.envs.GymEnv("Pendulum-v1", num_envs=2)
        env = recurl.envs.TransformedEnv(env, recurl.envs.StepCounter(max_steps=13))
        policy = TensorDictSequential(actor, critic)
        collector = recurl.collectors.Collector(env, policy, frames_per_batch=40, total_frames=80)
        return actor, critic, list(collector)[-1]  # the second: its rows start in the middle of episodes

    def losses(self, loss: Any, batch: TensorDictBase) -> list[Any]:
        losses = loss(batch)
        names = ["loss_objective", "loss_critic", "loss_entropy"]
        loss.zero_grad()
        sum(losses[name] for name in names).backward()
        return [[losses[name].detach() for name in names], gradients(loss)]

    def test_torchrls_loss_reads_batches_and_samples_of_recurl(self) -> None:
        """TorchRL's loss equals recurl's, with modules of either library."""
        actor, critic, batch = self.collected()
        batch = recurl.objectives.value.GAE(0.99, 0.95, critic)(batch)
        buffer = recurl.data.TensorDictReplayBuffer(
            storage=recurl.data.LazyTensorStorage(40),
            sampler=recurl.data.SliceSampler(slice_len=5, strict_length=False),
            batch_size=20,
        )
        buffer.extend(batch.reshape(-1))
        (minibatch, *_) = recurl.data.SequenceMinibatches(batch, 2, slice_len=7)
        theirs = actor_and_critic(TORCHRL, heads=RECURL)
        for mine, their in zip((actor, critic), theirs, strict=True):
            their.load_state_dict(mine.state_dict())
        for data in (batch, buffer.sample(), minibatch):
            expected = self.losses(recurl.objectives.ClipPPOLoss(actor, critic), data.clone())
            for networks in ((actor, critic), theirs):
                found = self.losses(ClipPPOLoss(*networks), data.clone())
                torch.testing.assert_close(found, expected, **TOLERANCE)

    def test_recurls_gae_and_loss_read_batches_of_torchrl(self) -> None:
        actor, critic, batch = collect(RECURL, heads=RECURL)
        batch = recurl.objectives.value.GAE(0.99, 0.95, critic)(batch)
        losses = recurl.objectives.ClipPPOLoss(actor, critic)(batch)
        assert abs(losses["kl_approx"]) < 1e-6
        expected = ClipPPOLoss(actor, critic)(batch)
        for name in ("loss_objective", "loss_critic", "loss_entropy"):
            torch.testing.assert_close(losses[name], expected[name])

    def test_recurls_loss_runs_torchrls_modules_over_sequences(self) -> None:
        """recurl's recurrent mode applies to TorchRL's modules too."""
        actor, critic, batch = self.collected()
        batch = recurl.objectives.value.GAE(0.99, 0.95, critic)(batch)
        expected = self.losses(recurl.objectives.ClipPPOLoss(actor, critic), batch.clone())
        theirs = actor_and_critic(TORCHRL, heads=RECURL)
        for mine, their in zip((actor, critic), theirs, strict=True):
            their.load_state_dict(mine.state_dict())
        found = self.losses(recurl.objectives.ClipPPOLoss(*theirs), batch.clone())
        torch.testing.assert_close(found, expected, **TOLERANCE)

    @pytest.mark.parametrize("name", ["A2CLoss", "ReinforceLoss"])
    def test_policy_gradients_are_torchrls(self, name: str) -> None:
        actor, critic, batch = self.collected()
        batch = recurl.objectives.value.TDLambdaEstimator(0.99, 0.95, critic)(batch)
        options = {"entropy_bonus": False} if name == "A2CLoss" else {}
        found = [
            outcome(getattr(library, name)(actor, critic, **options), batch.clone())
            for library in (recurl.objectives, torchrl.objectives)
        ]
        for key in ("loss_objective", "loss_critic", "loss_actor", "loss_value"):
            assert (key in found[0][0]) == (key in found[1][0])
            if key in found[0][0]:
                torch.testing.assert_close(found[0][0][key], found[1][0][key], **TOLERANCE)
