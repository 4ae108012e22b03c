"""Torques of a two-link arm from an exported policy: what a ROS 2 node computes, without ROS.

It needs numpy and onnxruntime only, and reads messages by their fields, so that it can be tried without a robot. The
policy is one of recurl/MaskedArm-v0 that doesn't read privileged observations.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import onnxruntime


class ArmController:
    """Computes the torques of one step after the other, and keeps the hidden states of the policy.

    Torques are zero while a joint state or the target is missing, not finite, or the joint state is older than
    ``timeout``. The memory then no longer fits what the arm does, and starts afresh with the next joint state.

    Args:
        path: file exported with ``recurl export --format onnx``.
        joints: names of shoulder and elbow in messages of type sensor_msgs/JointState.
        torque: largest torques of shoulder and elbow in N m, which an action of 1 stands for.
        timeout: age in s from which on a joint state is not used.
    """

    def __init__(self, path, joints=("shoulder", "elbow"), torque=(6.0, 2.0), timeout=0.1):
        path = Path(path)
        about = json.loads(path.with_name(path.name + ".json").read_text())
        model = path.read_bytes()
        if hashlib.sha256(model).hexdigest() != about["sha256"]:
            raise ValueError(f"{path} is damaged, or not the file that was exported")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # a small network, beside other processes of the robot
        self.session = onnxruntime.InferenceSession(model, options)
        self.joints, self.torque, self.timeout = joints, np.array(torque), timeout
        shapes = {entry["name"]: entry["shape"][1:] for entry in about["inputs"]}
        self.observed = next(iter(shapes))
        if shapes.keys() != {self.observed, "is_init", *about["states"]} or shapes[self.observed] != [6]:
            raise ValueError(f"{path} must read the six numbers of MaskedArm's observation, but it reads {shapes}")
        self.states = {name: np.zeros((1, *shapes[name]), np.float32) for name in about["states"]}
        self.angles, self.measured, self.target, self.start = None, -np.inf, None, True

    def on_joint_state(self, message, now):
        """Take a message of type sensor_msgs/JointState, which names joints in any order, at time ``now`` in s."""
        angles = dict(zip(message.name, message.position, strict=True))
        if all(joint in angles for joint in self.joints):  # other nodes publish other joints
            self.angles, self.measured = np.array([angles[joint] for joint in self.joints]), now

    def on_target(self, message):
        """Take a message of type geometry_msgs/Point: where the tip shall be, in m from the shoulder."""
        self.target = np.array([message.x, message.y])

    def reset(self):
        """Forget the past, as at the start of an episode."""
        self.start = True

    def step(self, now):
        """Return the torques of shoulder and elbow in N m; call it every 0.05 s, as in training."""
        if self.angles is None or self.target is None or now - self.measured > self.timeout:
            return self._stopped()
        shoulder, elbow = self.angles
        parts = (np.cos(shoulder), np.sin(shoulder), np.cos(elbow), np.sin(elbow), *self.target)
        observation = np.array([parts], np.float32)
        if not np.isfinite(observation).all():
            return self._stopped()
        inputs = {self.observed: observation, "is_init": np.array([self.start]), **self.states}
        action, *after = self.session.run(None, inputs)
        self.states, self.start = dict(zip(self.states, after, strict=True)), False
        return (np.clip(action[0], -1, 1) * self.torque).tolist()

    def _stopped(self):
        self.reset()
        return [0.0, 0.0]
