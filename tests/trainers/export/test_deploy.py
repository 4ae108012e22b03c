"""examples/deploy: the C program and the ROS 2 node around an exported file act as the policy."""

import importlib
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch

import recurl
import tests.envs.masked
import tests.trainers.sights  # noqa: F401 - both register environments
from bench_control_loop import build
from recurl.envs import set_exploration_type
from recurl.sequences.mode import ExplorationType
from recurl.trainers import PPOConfig, export_run, load_agent, make_env
from recurl.trainers.export.policy_step import PolicyStep
from recurl.trainers.export.verification import rows_on_cpu
from tests.trainers.sights import PARTS
from tests.trainers.small_runs import trained

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves", "brief_verification")]

DEPLOY = Path(__file__).parents[3] / "examples" / "deploy"
ARM = "recurl/MaskedArm-v0"
compiled = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(scope="module")
def control_loop(tmp_path_factory):
    """The compiled program, with the library of the Python wheel."""
    return build(tmp_path_factory.mktemp("deploy"), flags="-std=c11 -Wall -Wextra -Werror -pedantic")


def run(program, path, lines="", hz=0):
    words = [program, path, str(hz)]
    return subprocess.run(words, input=lines, capture_output=True, text=True, check=False)


def recorded(folder, steps=80):
    """Return lines of observations, and the actions of the policy of a run, over episodes and some resets."""
    config, agent = load_agent(folder)
    policy = PolicyStep(agent.actor)
    draws = torch.Generator().manual_seed(0)
    lines, actions = [], []
    with make_env(config, 1, policy=agent.actor) as env:
        env.set_seed(0)
        root = env.reset()
        for _ in range(steps):
            rows = rows_on_cpu(root)
            rows.set("is_init", rows.get("is_init") | (torch.rand(1, 1, generator=draws) < 0.1))
            with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
                step = policy.actor(rows)
            numbers = [number for key in policy.observations for number in rows.get(key).double().flatten().tolist()]
            lines.append(" ".join(map(repr, [int(rows.get("is_init")), *numbers])))
            actions.append(step.get("action").double().flatten().tolist())
            _, root = env.step_and_maybe_reset(step.reshape(env.batch_size))
    return "\n".join(lines), actions


@compiled
@pytest.mark.parametrize(
    ("env", "options"),
    [
        (ARM, {"cell": "lstm", "num_layers": 2, "critic_observations": ("privileged",)}),
        ("RecurlTest/Masked-v0", {"cell": "mingru", "previous_action": True}),
        (PARTS, {"cell": "gru", "drop_observations": ("mission",)}),
        ("CartPole-v1", {"cell": "none"}),
    ],
    ids=["two layers", "mask", "entries", "no memory"],
)
def test_the_program_in_c_acts_as_the_policy(tmp_path, control_loop, env, options):
    folder = trained(tmp_path, PPOConfig, env, options)
    path = export_run(folder, "onnx")
    lines, actions = recorded(folder)
    for hz in (0, 2000):
        end = run(control_loop, path, lines, hz)
        assert end.returncode == 0, end.stderr
        table = np.array([list(map(float, line.split(","))) for line in end.stdout.splitlines()])
        np.testing.assert_allclose(table[:, 2:], actions, rtol=1e-5, atol=1e-5)
        assert (table[:, :2] >= 0).all()


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """File of a policy of MaskedArm, fully verified."""
    options = {"cell": "gru", "drop_observations": ("privileged",)}
    return export_run(trained(tmp_path_factory.mktemp("arm"), PPOConfig, ARM, options), "onnx")


def _without_is_init(graph):
    graph.input[1].name = "start"
    for node in graph.node:
        node.input[:] = ["start" if name == "is_init" else name for name in node.input]


@compiled
def test_what_the_program_refuses(tmp_path, control_loop, arm):
    def refused(path, lines, match):
        end = run(control_loop, path, lines)
        assert (end.returncode, end.stdout) == (1, "")
        assert match in end.stderr

    row = "1 0 0 0 0 0 0\n"
    refused(arm, "1 0 nan 0 0 0 0", "observation: its numbers must be finite, got nan at 1")
    refused(arm, row + "0 0 0", "The input must have lines of 7 numbers, got 10 numbers")
    refused(arm, row + "word", "The input must have lines of 7 numbers, got 7 numbers")
    refused(arm, "", "got 0 numbers")
    refused(tmp_path / "missing.onnx", row, "missing.onnx was not loaded")
    (tmp_path / "damaged.onnx").write_bytes(arm.read_bytes()[:1000])
    refused(tmp_path / "damaged.onnx", row, "damaged.onnx was not loaded")
    onnx = importlib.import_module("onnx")
    for edit, match in (
        (_without_is_init, "lacks the input is_init"),
        (lambda graph: graph.output.pop(), "or the outputs of its states"),
        (lambda graph: graph.output.extend([graph.output.pop(0)]), "its next value must be an output of the same size"),
    ):
        model = onnx.load(arm)
        edit(model.graph)
        onnx.save(model, tmp_path / "other.onnx")
        refused(tmp_path / "other.onnx", row, match)
    end = subprocess.run([control_loop], capture_output=True, text=True, check=False)
    assert (end.returncode, end.stderr[:6]) == (2, "usage:")


@pytest.fixture
def deploy(monkeypatch):
    """Importer of the modules of examples/deploy, which forgets them after the test."""
    monkeypatch.syspath_prepend(str(DEPLOY))
    names = ("arm_controller", "policy_node")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def joint_state(observation, *, order=(0, 1)):
    """A message of type sensor_msgs/JointState with the angles of an observation, and another joint."""
    c1, s1, c2, s2 = map(float, observation[:4])
    angles = [math.atan2(s1, c1), math.atan2(s2, c2)]
    names = ["shoulder", "elbow"]
    return SimpleNamespace(
        name=["gripper", *(names[at] for at in order)], position=[0.5, *(angles[at] for at in order)]
    )


def point(observation):
    return SimpleNamespace(x=float(observation[4]), y=float(observation[5]), z=0.0)


def test_the_controller_acts_as_the_policy(arm, deploy):
    controller, policy = deploy("arm_controller").ArmController(arm), recurl.load(arm)
    env = gymnasium.make(f"recurl.envs:{ARM}")
    observation, _ = env.reset(seed=0)
    state, now = None, 100.0
    for step in range(300):
        seen = observation["observation"]
        controller.on_joint_state(joint_state(seen, order=(1, 0) if step % 2 else (0, 1)), now)
        controller.on_joint_state(SimpleNamespace(name=["wheel"], position=[1.0]), now)
        controller.on_target(point(seen))
        if step == 50:
            controller.reset()
            state = None
        action, state = policy.predict({"observation": seen}, state)
        torque = controller.step(now + 0.001)
        np.testing.assert_allclose(torque, action * [6.0, 2.0], rtol=1e-4, atol=1e-4)
        observation, _, _, truncated, _ = env.step(action)
        now += 0.05
        if truncated:
            observation, _ = env.reset()
            controller.reset()
            state = None
    env.close()


def test_the_controller_stops_without_fresh_observations(arm, deploy, tmp_path):
    kind = deploy("arm_controller").ArmController
    seen = np.array([1, 0, 1, 0, 0.5, 0.2], np.float32)

    controller = kind(arm)
    assert controller.step(0.0) == [0.0, 0.0]
    controller.on_joint_state(joint_state(seen), 0.0)
    assert controller.step(0.0) == [0.0, 0.0]  # without a target
    controller.on_target(point(seen))
    first = [controller.step(0.0) for _ in range(3)]
    assert first[0] != first[1]
    for breaks, now in (
        (lambda: None, 1.5),  # an old joint state
        (lambda: controller.on_target(SimpleNamespace(x=math.nan, y=0.0)), 1.0),
        (
            lambda: controller.on_joint_state(SimpleNamespace(name=["elbow", "shoulder"], position=[0, math.nan]), 1.0),
            1.0,
        ),
    ):
        breaks()
        assert controller.step(now) == [0.0, 0.0]
        controller.on_joint_state(joint_state(seen), 1.0)
        controller.on_target(point(seen))
        assert [controller.step(1.0) for _ in range(3)] == first  # the memory has started afresh
    shutil.copy(arm, tmp_path / "policy.onnx")
    about = json.loads(arm.with_name("policy.onnx.json").read_text())
    (tmp_path / "policy.onnx.json").write_text(json.dumps(about | {"sha256": "0" * 64}))
    with pytest.raises(ValueError, match=r"policy\.onnx is damaged"):
        kind(tmp_path / "policy.onnx")


class Publisher(list):
    def publish(self, message):
        self.append(list(message.data))


class Node:
    """What the node uses of rclpy.node.Node, without ROS."""

    given, time = {}, 0.0

    def __init__(self, name):
        self.name, self.topics, self.timers, self.services = name, {}, [], {}

    def declare_parameter(self, name, default):
        return SimpleNamespace(value=self.given.get(name, default))

    def create_publisher(self, kind, topic, depth):
        self.topics[topic] = Publisher()
        return self.topics[topic]

    def create_subscription(self, kind, topic, call, profile):
        self.topics[topic] = call

    def create_service(self, kind, name, call):
        self.services[name] = call

    def create_timer(self, period, call):
        self.timers.append((period, call))

    def get_clock(self):
        return SimpleNamespace(now=lambda: SimpleNamespace(nanoseconds=int(self.time * 1e9)))


def test_the_node_with_a_stand_in_for_ros(arm, deploy, monkeypatch):
    spun = []
    parts = {
        "rclpy": {"init": lambda: None, "spin": spun.append, "try_shutdown": lambda: None},
        "rclpy.node": {"Node": Node},
        "rclpy.qos": {"qos_profile_sensor_data": object()},
        **{f"{name}.{kind}": {} for name in ("geometry_msgs", "sensor_msgs", "std_msgs") for kind in ("msg",)},
        "std_srvs.srv": {},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        for key in ("Point", "JointState", "Float64MultiArray", "Trigger"):
            setattr(module, key, SimpleNamespace)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Node, "given", {"policy": str(arm)})
    deploy("policy_node").main()
    (node,) = spun
    ((period, timer),) = node.timers
    assert period == 0.05
    seen = np.array([1, 0, 0, 1, 0.5, 0.2], np.float32)
    timer()
    node.topics["joint_states"](joint_state(seen))
    node.topics["target"](point(seen))
    for _ in range(3):
        timer()
    response = node.services["~/reset"](None, SimpleNamespace(success=False))
    assert response.success
    for _ in range(3):
        timer()
    node.time = 1.0
    timer()
    commands = node.topics["effort_controller/commands"]
    assert commands[0] == commands[-1] == [0.0, 0.0]
    assert commands[1:4] == commands[4:7]
    assert commands[1] != commands[2]
