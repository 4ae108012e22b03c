"""Checkpoints of rsl_rl's recurrent PPO become actors and critics of recurl, and back, with the same outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

import recurl
from recurl.collectors import Collector
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs import TensorEnv
from recurl.envs.tasks import MaskedArm
from recurl.envs.wiring import policy_transforms
from recurl.modules import (
    MLP,
    GRUModule,
    IndependentNormal,
    LearnedScale,
    LSTMModule,
    NormalParamExtractor,
    ObservationNorm,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from recurl.modules.rsl_rl import JoinedObservations, from_rsl_rl, to_rsl_rl
from recurl.objectives import ClipPPOLoss
from recurl.objectives.value import GAE
from recurl.trainers import (
    ALGORITHMS,
    PPO,
    Algorithm,
    OwnActorCritic,
    PPOConfig,
    RunFolder,
    Trainer,
    load_agent,
)
from recurl.trainers.networks.actor_critic import ActorCritic
from tests.interop.rsl_rl_models import HIDDEN, Model, checkpoint, load

ROWS, STEPS, ACTIONS = 5, 20, 2
SIZES = {"policy": 4, "privileged": 3}
KEYS = {"observations": "policy", "critic_observations": ["policy", "privileged"]}
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


def models(cell: str = "lstm", *, seed: int = 0, **options: Any) -> tuple[Model, Model]:
    torch.manual_seed(seed)
    actor = Model(cell, 4, ACTIONS, stochastic=True, **options)
    critic = Model(cell, 7, 1, **{name: value for name, value in options.items() if name != "log"})
    if options.get("norm", True):
        for model, size in ((actor, 4), (critic, 7)):
            for _ in range(3):
                model.obs_normalizer.update(torch.randn(50, size) * torch.linspace(0.1, 3.0, size) + 1.0)
    return actor, critic


def observed() -> tuple[TensorDict, Tensor]:
    """Return observations ``[ROWS, STEPS]`` and the rows done before each step."""
    torch.manual_seed(9)
    done = torch.rand(ROWS, STEPS) < 0.2
    done[:, 0] = True
    data = {name: torch.randn(ROWS, STEPS, size) + 1.0 for name, size in SIZES.items()}
    return TensorDict({**data, "is_init": done.unsqueeze(-1)}, [ROWS, STEPS]), done


@torch.no_grad()
def expected(actor: Model, critic: Model, batch: TensorDict, done: Tensor, action: Tensor) -> list[Tensor]:
    """Return rsl_rl's means, log-probabilities and values, step by step with resets."""
    steps: list[list[Tensor]] = []
    for t in range(STEPS):
        for model in (actor, critic):
            model.reset(done[:, t])
        seen, hidden = batch["policy"][:, t], batch["privileged"][:, t]
        mean = actor(seen)
        log_prob = actor.normal(mean).log_prob(action[:, t]).sum(-1)
        steps.append([mean, log_prob, critic(torch.cat([seen, hidden], -1))])
    return [torch.stack(values, 1) for values in zip(*steps, strict=True)]


@torch.no_grad()
def found(actor: Any, critic: Any, batch: TensorDict, action: Tensor) -> list[Tensor]:
    """Return the same of recurl's networks, over whole sequences."""
    with set_recurrent_mode(True):
        dist = actor.get_dist(batch.copy())
        return [dist.deterministic_sample, dist.log_prob(action), critic(batch.copy())["state_value"]]


@torch.no_grad()
def acted(actor: Any, batch: TensorDict) -> Tensor:
    """Return recurl's actions, step by step."""
    state, actions = TensorDict({}, [ROWS]), list[Tensor]()
    for t in range(STEPS):
        state = actor(batch[:, t].copy().update(state))
        actions.append(state["action"])
        state = state["next"].clone()
    return torch.stack(actions, 1)


class TestBothWays:
    @pytest.mark.parametrize("cell", ["lstm", "gru"])
    @pytest.mark.parametrize("version", [2, 3, 4, 5])
    @pytest.mark.parametrize(
        "options",
        [{}, {"norm": False}, {"log": True}, {"layers": 2}],
        ids=["normalized", "not normalized", "log", "two layers"],
    )
    def test_outputs_are_equal_over_a_rollout_with_resets(
        self, cell: str, version: int, options: dict[str, Any], tmp_path: Path
    ) -> None:
        theirs = models(cell, **options)
        if version == 2 and not options.get("norm", True):
            version = 1
        path = tmp_path / "model_7.pt"
        torch.save(checkpoint(*theirs, version), path)
        actor, critic = from_rsl_rl(path, **KEYS)
        batch, done = observed()
        action = torch.randn(ROWS, STEPS, ACTIONS)
        wanted = expected(*theirs, batch, done, action)
        torch.testing.assert_close(found(actor, critic, batch, action), wanted, **CLOSE)
        torch.testing.assert_close(acted(actor, batch), wanted[0], **CLOSE)

        back = models(cell, seed=1, **options)
        torch.save(to_rsl_rl(actor, critic, version=max(version, 2)), path)
        load(torch.load(path, weights_only=True), *back, version)
        for old, new in zip(theirs, back, strict=True):
            torch.testing.assert_close(new.state_dict(), old.state_dict(), rtol=0, atol=1e-7)
        torch.testing.assert_close(expected(*back, batch, done, action), wanted, **CLOSE)

    @pytest.mark.parametrize(("name", "layer"), [("relu", nn.ReLU()), ("lrelu", nn.LeakyReLU()), ("Tanh", nn.Tanh())])
    def test_other_activations(self, name: str, layer: nn.Module) -> None:
        theirs = models(activation=layer)
        actor, critic = from_rsl_rl(checkpoint(*theirs, 5), activation=name, **KEYS)
        batch, done = observed()
        action = torch.randn(ROWS, STEPS, ACTIONS)
        torch.testing.assert_close(found(actor, critic, batch, action), expected(*theirs, batch, done, action), **CLOSE)

    def test_statistics_go_on_alike(self) -> None:
        theirs = models()
        actor, _ = from_rsl_rl(checkpoint(*theirs, 5), **KEYS)
        more = torch.randn(40, 4) * 5.0
        theirs[0].obs_normalizer.update(more)
        (joined,) = [module for module in actor.modules() if isinstance(module, JoinedObservations)]
        joined.update(more)
        x = torch.randn(3, 4)
        torch.testing.assert_close(joined(x), theirs[0].obs_normalizer(x), **CLOSE)

    def test_the_optimizer_of_the_runner_begins_with_a_learning_rate(self) -> None:
        saved = to_rsl_rl(*from_rsl_rl(checkpoint(*models(), 5), **KEYS), learning_rate=3e-4)
        (group,) = saved["optimizer_state_dict"]["param_groups"]
        assert (group["lr"], saved["optimizer_state_dict"]["state"]) == (3e-4, {})

    def test_an_actor_and_a_critic_of_ones_own(self) -> None:
        def trunk(name: str) -> list[Any]:
            states = [f"{name}_h", f"{name}_c"]
            out = [f"{name}_features", *(("next", state) for state in states)]
            return [LSTMModule(4, 8, in_keys=["policy", *states], out_keys=out)]

        net = nn.Sequential(MLP(8, ACTIONS, num_cells=[16, 12], activation_class=nn.ELU), LearnedScale(ACTIONS, 0.3))
        head = TensorDictModule(net, in_keys=["actor_features"], out_keys=["loc", "scale"])
        actor = ProbabilisticActor(
            TensorDictSequential(*trunk("actor"), head), ["loc", "scale"], distribution_class=IndependentNormal
        )
        value = MLP(8, 1, num_cells=[16, 12], activation_class=nn.ELU)
        critic = TensorDictSequential(*trunk("critic"), ValueOperator(value, in_keys=["critic_features"]))
        theirs = Model("lstm", 4, ACTIONS, norm=False, stochastic=True), Model("lstm", 4, 1, norm=False)
        load(to_rsl_rl(actor, critic), *theirs, 5)
        batch, _ = observed()
        mean = theirs[0](batch["policy"][:, 0])
        torch.testing.assert_close(actor(batch[:, 0])["loc"], mean, **CLOSE)
        assert theirs[0].distribution.std.tolist() == pytest.approx([0.3, 0.3])


if find_spec("rsl_rl") is not None:  # make setup installs it

    @pytest.mark.parametrize("cell", ["lstm", "gru"])
    @pytest.mark.parametrize("log", [False, True])
    def test_the_models_rebuilt_here_are_those_of_rsl_rl(cell: str, log: bool) -> None:
        from rsl_rl.models import RNNModel

        rebuilt = models(cell, log=log)
        batch, done = observed()
        action = torch.randn(ROWS, STEPS, ACTIONS)
        wanted = expected(*rebuilt, batch, done, action)
        groups = {"actor": ["policy"], "critic": ["policy", "privileged"]}
        sizes = {"hidden_dims": HIDDEN, "rnn_hidden_dim": 8, "rnn_type": cell, "obs_normalization": True}
        gaussian = {"class_name": "GaussianDistribution", "std_type": "log" if log else "scalar"}
        first = batch[:, 0]
        actor = RNNModel(first, groups, "actor", ACTIONS, distribution_cfg=gaussian, **sizes)
        critic = RNNModel(first, groups, "critic", 1, **sizes)
        load(to_rsl_rl(*from_rsl_rl(checkpoint(*rebuilt, 5), **KEYS)), actor, critic, 5)
        for t in range(STEPS):
            for model in (actor, critic):
                model.reset(done[:, t].float())
            with torch.no_grad():
                actor(batch[:, t], stochastic_output=True)
                found = [actor.output_mean, actor.get_output_log_prob(action[:, t]), critic(batch[:, t])]
            torch.testing.assert_close(found, [values[:, t] for values in wanted], **CLOSE)


@pytest.mark.usefixtures("brief_verification")
class TestUse:
    def test_a_converted_policy_collects_learns_and_is_exported(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        theirs = Model("gru", 6, ACTIONS, stochastic=True), Model("gru", 12, 1)
        actor, critic = from_rsl_rl(
            checkpoint(*theirs, 5), observations="observation", critic_observations=["observation", "privileged"]
        )
        env = TensorEnv(MaskedArm(max_episode_steps=5), 4)
        policy = TensorDictSequential(*critic.module[:-1], actor)  # the critic's states are stored, too
        batch = Collector(env, policy, frames_per_batch=64).collect()
        GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
        losses = ClipPPOLoss(actor, critic)(batch)
        assert losses["max_ratio"].item() == pytest.approx(1.0, abs=1e-4)
        sum(losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy")).backward()
        assert all(weight.grad is not None for weight in (*actor.parameters(), *critic.parameters()))
        wanted = theirs[0](torch.ones(1, 6))[0].detach().numpy()
        for suffix in ("pt2", "recurl"):
            path = recurl.export_policy(actor, env, tmp_path / f"policy.{suffix}")
            action, _ = recurl.load(path).predict({"observation": torch.ones(6).numpy()})
            assert action == pytest.approx(wanted, abs=1e-5)


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig(PPOConfig):
    """PPO that starts from a checkpoint of rsl_rl."""

    algorithm: ClassVar[str] = "fine_tuning"
    checkpoint: str


class FineTuning(PPO):
    @classmethod
    def make_agent(cls, config: FineTuningConfig, observation_spec: Any, action_spec: Any) -> OwnActorCritic:
        keys = {"observations": "observation", "critic_observations": ["observation", "privileged"]}
        networks = from_rsl_rl(config.checkpoint, **keys, recurrent_backend=config.backend)
        return OwnActorCritic(config, observation_spec, *networks)


def arms(num_envs: int) -> TensorEnv:
    return TensorEnv(MaskedArm(max_episode_steps=7), num_envs)


class TestRuns:
    @pytest.mark.parametrize("cell", ["lstm", "gru"])
    def test_a_run_trains_on_from_a_checkpoint_resumes_and_becomes_one(
        self, cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(ALGORITHMS, "fine_tuning", Algorithm(FineTuningConfig, FineTuning))
        torch.manual_seed(0)
        theirs = Model(cell, 6, ACTIONS, stochastic=True), Model(cell, 12, 1)
        path = tmp_path / "model_9.pt"
        torch.save(checkpoint(*theirs, 5), path)
        options = {"num_envs": 4, "rollout_steps": 16, "cell": cell, "hidden_size": 8, "logger": "none"}
        config = FineTuningConfig(
            env=arms,
            critic_observations=("privileged",),
            total_steps=128,
            checkpoint=str(path),
            device="cpu",
            **options,
        )
        folder = RunFolder(tmp_path / "run")
        folder.create(config)
        for resumed in (False, True):
            trainer = Trainer(config, folder, console=Console(quiet=True))
            if resumed:
                trainer.resume()
            assert trainer.run().status == "finished"
            trainer.close()
            config = replace(config, total_steps=192)
        _, agent = load_agent(folder, env=arms)
        back = Model(cell, 6, ACTIONS, stochastic=True), Model(cell, 12, 1)
        load(to_rsl_rl(agent.actor, agent.critic, version=3), *back, 3)
        assert [model.obs_normalizer.count.item() for model in back] == [192, 192]
        assert not torch.equal(back[0].distribution.std, theirs[0].distribution.std)
        env = arms(3)
        for transform in policy_transforms(agent.actor, env):
            env = env.append_transform(transform)
        steps = env.rollout(20, agent.actor, break_when_any_done=False)
        for t in range(20):
            back[0].reset(steps["is_init"][:, t, 0])
            torch.testing.assert_close(back[0](steps["observation"][:, t]), steps["action"][:, t], **CLOSE)

    def test_what_a_run_needs_must_be_written(self) -> None:
        actor, critic = from_rsl_rl(checkpoint(*models(), 5), **KEYS)
        env = arms(2)
        config = PPOConfig(env=env, num_envs=2)
        with pytest.raises(
            ArgumentError, match=r"The critic must write \['state_value'\], and writes \['actor_inputs'"
        ):
            OwnActorCritic(config, env.observation_spec, actor, actor)
        with pytest.raises(ArgumentError, match=r"The actor must write \['action', 'action_log_prob'\], and writes"):
            OwnActorCritic(config, env.observation_spec, critic, critic)  # pyright: ignore[reportArgumentType]


class TestRefusals:
    def refused(self, contents: Any, message: str) -> None:
        with pytest.raises((UnsupportedError, ArgumentError), match=message):
            from_rsl_rl(contents)

    def test_of_what_is_no_checkpoint(self, tmp_path: Path) -> None:
        self.refused({"student_state_dict": {}}, "actor_state_dict and critic_state_dict .* got .'student_state_dict'")
        self.refused(tmp_path / "model_1.pt", "There is no file")
        path = tmp_path / "model_2.pt"
        torch.save([1], path)
        self.refused(path, "must hold a checkpoint of rsl_rl, a dict, got list")

    def test_of_networks_that_recurl_has_not(self) -> None:
        def changed(role: str, drop: str = "", version: int = 5, **more: Any) -> dict[str, Any]:
            contents = checkpoint(*models(), version)
            name = f"{role}_state_dict"
            contents[name] = {key: value for key, value in contents[name].items() if not drop or drop not in key}
            contents[name] |= more
            return contents

        weight = torch.zeros(1)
        self.refused(changed("actor", "std_param"), "state-dependent, or another distribution")
        self.refused(changed("actor", "std", version=4), "state-dependent, or another distribution")
        self.refused(changed("actor", "rnn"), "the actor has no recurrent layers")
        self.refused(changed("critic", **{"cnns.camera.0.weight": weight}), "the critic encodes images with convol")
        self.refused(changed("critic", **{"scan.weight": weight}), "the critic also holds scan.weight")
        self.refused(changed("model", version=3, **{"memory_s.x": weight, "b": weight}), "memory_s.x and 1 more entr")
        self.refused(changed("model", "actor.", version=3), "has no MLP")

    def test_of_an_unknown_activation_or_version(self) -> None:
        contents = checkpoint(*models(), 5)
        with pytest.raises(ArgumentError, match=r"activation must be one of elu, .*, got 'cos'"):
            from_rsl_rl(contents, activation="cos")
        with pytest.raises(ArgumentError, match=r"version must be one of \(2, 3, 4, 5\), got 6"):
            to_rsl_rl(*from_rsl_rl(contents), version=6)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"clip": 10.0}, "ObservationNorm must have clip=inf, .*, not clip=10.0"),
            ({"dropout": 0.5}, "must be an LSTM or GRU with biases, without projection, dropout"),
            ({"kind": TanhNormal}, "must sample from IndependentNormal, not TanhNormal"),
            ({"scale": NormalParamExtractor()}, "standard deviation must be a parameter"),
            ({"layers": []}, "two or more linear layers .*, not Linear"),
            ({"layers": [16, 16], "activation": nn.PReLU}, "activations of one kind .*, not Linear, PReLU, Linear"),
            ({"encoder": nn.Linear(4, 4)}, "before the memory, the actor may have JoinedObservations only, not Linear"),
        ],
    )
    def test_of_networks_that_rsl_rl_has_not(self, change: dict[str, Any], message: str) -> None:
        given: dict[str, Any] = {
            "clip": torch.inf,
            "dropout": 0.0,
            "kind": IndependentNormal,
            "scale": LearnedScale(ACTIONS),
            "layers": [16],
            "activation": nn.ELU,
            **change,
        }
        norm = ObservationNorm((4,), clip=given["clip"], eps=0.0, std_eps=0.01)
        first = given.get("encoder", JoinedObservations(norm))
        memory = GRUModule(
            4, 8, dropout=given["dropout"], num_layers=2, in_keys=["x", "s"], out_keys=["features", ("next", "s")]
        )
        outputs = ACTIONS if isinstance(given["scale"], LearnedScale) else 2 * ACTIONS
        net = MLP(8, outputs, num_cells=given["layers"], activation_class=given["activation"])
        actor = ProbabilisticActor(
            TensorDictSequential(
                TensorDictModule(first, in_keys=["policy"], out_keys=["x"]),
                memory,
                TensorDictModule(nn.Sequential(net, given["scale"]), in_keys=["features"], out_keys=["loc", "scale"]),
            ),
            ["loc", "scale"],
            distribution_class=given["kind"],
        )
        with pytest.raises(UnsupportedError, match=message):
            to_rsl_rl(actor, from_rsl_rl(checkpoint(*models(), 5))[1])

    def test_of_one_normalizer_in_version_2(self) -> None:
        actor, _ = from_rsl_rl(checkpoint(*models(), 5))
        _, critic = from_rsl_rl(checkpoint(*models(norm=False), 5))
        with pytest.raises(UnsupportedError, match="of both, actor and critic, or of none"):
            to_rsl_rl(actor, critic, version=2)

    def test_of_the_networks_of_runs(self) -> None:
        env = TensorEnv(MaskedArm(), 2)
        agent = ActorCritic(
            PPOConfig(env="recurl/MaskedArm-v0", device="cpu"), env.observation_spec, env.action_spec_unbatched
        )
        with pytest.raises(UnsupportedError, match="rsl_rl has no such network: the actor must sample from Indep"):
            to_rsl_rl(agent.actor, agent.critic)
