"""Teachers for tests of all algorithms."""

from recurl.trainers import PPOConfig
from tests.trainers.run.test_trainer import train


def teacher_for(algorithm, env, folder):
    """Return the options that name a teacher, trained into ``folder``, if the algorithm needs one."""
    if algorithm != "distill":
        return {}
    small = {"hidden_size": 4, "num_envs": 2, "rollout_steps": 8, "total_steps": 16, "minibatches": 1}
    train(PPOConfig(env=env, **small), folder)
    return {"teacher": str(folder), "minibatches": 2}
