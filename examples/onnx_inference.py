"""Run an exported policy without recurl (except for its own tasks): only gymnasium, numpy and onnxruntime.

recurl train ppo --env CartPole-v1 --run-dir runs/cartpole && recurl export runs/cartpole
python examples/onnx_inference.py runs/cartpole/policy.onnx
"""

import hashlib
import json
import sys
from pathlib import Path

import gymnasium
import numpy as np
import onnxruntime

path = Path(sys.argv[1])
about = json.loads(path.with_name(path.name + ".json").read_text())
model = path.read_bytes()
assert hashlib.sha256(model).hexdigest() == about["sha256"], f"{path} is damaged, or not the file that was exported"
session = onnxruntime.InferenceSession(model)
name = about["env"] if not about["env"].startswith("recurl/") else f"recurl.envs:{about['env']}"  # recurl's own tasks
env = gymnasium.make(name, **about["env_arguments"])

states = {
    i["name"]: np.zeros((1, *i["shape"][1:]), np.float32) for i in about["inputs"] if i["name"] in about["states"]
}
observation, _ = env.reset(seed=0)
done, total = False, 0.0
is_init = np.array([True])  # one flag per row: this row starts an episode, so its states are replaced by zeros
while not done:
    inputs = {"observation": observation[None].astype(np.float32), "is_init": is_init, **states}
    action, *after = session.run(None, inputs)
    states, is_init = dict(zip(states, after, strict=True)), np.array([False])
    observation, reward, terminated, truncated, _ = env.step(action[0])
    done, total = terminated or truncated, total + float(reward)
print(f"return {total:g}")
