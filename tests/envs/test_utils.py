from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from recurl.core.errors import ArgumentError, MissingKeyError, WiringError
from recurl.core.specs import Composite, Unbounded
from recurl.envs import GymEnv, GymWrapper, InitTracker, TransformedEnv, check_env_specs, step_mdp
from recurl.envs.utils import check_policy_wiring, policy_transforms, unfed_states
from recurl.modules import GRUModule, LSTMModule
from tests.envs.small import CountEnv


def policy(module=None, size=4):
    module = module or LSTMModule(input_size=size, hidden_size=8, in_key="observation", out_key="embed")
    head = TensorDictModule(torch.nn.Linear(8, 2), ["embed"], ["logits"])
    greedy = TensorDictModule(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    return TensorDictSequential(module, head, greedy)


class TestStepMdp:
    def td(self):
        after = {"observation": torch.ones(2), "reward": torch.ones(1), "done": torch.zeros(1), "deep": {"b": 1.0}}
        return TensorDict({"observation": torch.zeros(2), "action": torch.ones(1), "kept": 2.0, "next": after})

    def test_defaults(self):
        out = step_mdp(self.td())
        assert set(out.keys()) == {"observation", "kept", "done", "deep"}
        assert out["observation"].tolist() == [1.0, 1.0]

    def test_flags(self):
        td = self.td()
        out = step_mdp(td, keep_other=False, exclude_reward=False, exclude_done=True)
        assert set(out.keys()) == {"observation", "reward", "deep"}
        assert "action" in step_mdp(td, exclude_action=False)
        out["deep", "b"] = torch.tensor(5.0)
        assert td["next", "deep", "b"] == 1.0
        assert step_mdp(TensorDict({"next": {}}, [2])).batch_size == (2,)

    def test_it_needs_a_step(self):
        with pytest.raises(MissingKeyError, match=r"needs the result of env\.step"):
            step_mdp(TensorDict({}))


class TestWiring:
    def test_missing_entries_are_named(self):
        env = GymEnv("CartPole-v1")
        net = policy()
        with pytest.raises(MissingKeyError, match="append an InitTracker"):
            check_policy_wiring(net, env)
        with pytest.raises(MissingKeyError, match="append an InitTracker"):
            env.rollout(2, net)
        tracked = TransformedEnv(env, InitTracker())
        states = unfed_states(net, tracked)
        assert len(states) == 2
        with pytest.raises(WiringError, match="make_tensordict_primer"):
            tracked.rollout(2, net)
        wired = tracked.append_transform(net[0].make_tensordict_primer())
        assert unfed_states(net, wired) == []
        assert wired.rollout(2, net).shape == (2,)

    def test_a_state_written_elsewhere_is_never_fed_back(self):
        keys = {"in_keys": ["observation", "h"], "out_keys": ["embed", "h_out"]}
        net = policy(GRUModule(input_size=4, hidden_size=8, **keys))
        env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
        assert unfed_states(net, env) == ["h"]
        with pytest.raises(WiringError, match="'h'"):
            check_policy_wiring(net, env)

    def test_hand_written_states_count_too(self):
        net = TensorDictModule(lambda x, m: (x, m), ["observation", "m"], ["action", ("next", "m")])
        assert unfed_states(net, GymEnv("CartPole-v1")) == ["m"]
        assert unfed_states(lambda td: td, GymEnv("CartPole-v1")) == []

    def test_constructors_take_a_policy(self):
        net = policy()
        env = GymEnv("CartPole-v1", num_envs=2, policy=net)
        assert isinstance(env, TransformedEnv)
        assert [type(t).__name__ for t in env.transform] == ["InitTracker", "TensorDictPrimer"]
        check_env_specs(env)
        check_policy_wiring(net, env)
        assert policy_transforms(net, env) == []
        again = TransformedEnv(env, policy=net)
        assert again.observation_spec == env.observation_spec
        plain = GymWrapper(CountEnv(), policy=torch.nn.Linear(1, 1))
        assert isinstance(plain, TransformedEnv)
        assert "is_init" in plain.observation_spec


class TestCheckEnvSpecs:
    def test_wrong_shapes_and_entries_are_found(self):
        env = GymWrapper(CountEnv())
        env._observation = Composite({"observation": Unbounded(2)})
        with pytest.raises(ArgumentError, match="the root after reset must hold 'observation'"):
            check_env_specs(env)
        env._observation = Composite()
        with pytest.raises(ArgumentError, match=r"they differ in .*observation"):
            check_env_specs(env)
        env = GymWrapper(CountEnv())
        env._reward = Unbounded(3)
        with pytest.raises(ArgumentError, match="'next' after step must hold 'reward'"):
            check_env_specs(env)

    def test_actions_are_checked(self):
        class Wrong(Unbounded):
            def is_in(self, value):
                return False

        env = GymEnv("Pendulum-v1")
        env._action = Wrong(1)
        with pytest.raises(ArgumentError, match="A random action is not in the action spec"):
            check_env_specs(env)
