"""Run a trained policy in a Gymnasium loop.

recurl train ppo --env recurl/MaskedCartPole-v1 --run-dir runs/cartpole && python examples/act.py runs/cartpole
"""

import sys

import gymnasium

import recurl

policy = recurl.load(sys.argv[1])  # a run, or a file written by recurl export
env = gymnasium.make("recurl/MaskedCartPole-v1")
observation, _ = env.reset(seed=0)
state, done, total = None, False, 0.0
while not done:
    action, state = policy.predict(observation, state)
    observation, reward, terminated, truncated, _ = env.step(action)
    done, total = terminated or truncated, total + float(reward)
print(f"return {total:g}")
