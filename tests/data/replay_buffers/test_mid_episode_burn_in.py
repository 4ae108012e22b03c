import torch

from recurl.collectors import Collector
from recurl.data import BurnIn, LazyTensorStorage, MidEpisodeBurnIn, SliceSampler, TensorDictReplayBuffer
from recurl.trainers import DQN, DQNConfig, make_env


def test_slices_that_begin_an_episode_are_kept_whole():
    config = DQNConfig(env="recurl/TMaze-v0", env_kwargs=("corridor_length=6",), hidden_size=8)
    env = make_env(config, 4)
    agent = DQN.make_agent(config, env.observation_spec, env.action_spec_unbatched)
    batch = Collector(env, agent.policy, frames_per_batch=400).collect()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(400, ndim=2), sampler=SliceSampler(slice_len=6), batch_size=240
    )
    buffer.extend(batch)
    sample = buffer.sample()
    rest = MidEpisodeBurnIn(agent.actor, 4)(sample)
    begins = sample["collector", "stored", "is_init"].reshape(40, 6)[:, 0]
    assert 0 < begins.sum() < 40
    expected = torch.where(begins.unsqueeze(-1), torch.ones(40, 6), torch.arange(6) >= 4).bool().flatten()
    assert torch.equal(rest["index"], sample["index"][expected])
    assert rest["is_init"].sum() == 40
    usual = BurnIn(agent.actor, 4)(sample)
    middle = rest["is_init"].squeeze(-1) & ~rest["collector", "stored", "is_init"].squeeze(-1)
    where = (usual["index"].unsqueeze(-1) == rest["index"][middle]).float().argmax(0)
    torch.testing.assert_close(rest["state_h"][middle], usual["state_h"][where])
