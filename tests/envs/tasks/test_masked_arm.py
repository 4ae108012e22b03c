from __future__ import annotations

import numpy as np
import pytest

from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.envs import GymEnv, TensorEnv
from recurl.envs.tasks import MaskedArm, MaskedArmVectorEnv, masked_arm
from recurl.envs.tasks.namespaces import HOST

LENGTH, MASS, ROTOR, G = 0.5, 0.5, 0.05, 9.81


def energy(motion, factors, gravity):
    """Return the energy of uniform links: of their centers of mass, of their rotation about them, of their weight."""
    shoulder, elbow, first, second = motion
    one, two = MASS * factors[0], MASS * factors[1]
    total = 0.5 * ROTOR * (first**2 + second**2)
    both, turn = shoulder + elbow, first + second
    inertia = LENGTH**2 / 12
    for mass, speed, velocity, height in (
        (
            one,
            first,
            (-LENGTH / 2 * np.sin(shoulder) * first, LENGTH / 2 * np.cos(shoulder) * first),
            LENGTH / 2 * np.sin(shoulder),
        ),
        (
            two,
            turn,
            (
                -LENGTH * np.sin(shoulder) * first - LENGTH / 2 * np.sin(both) * turn,
                LENGTH * np.cos(shoulder) * first + LENGTH / 2 * np.cos(both) * turn,
            ),
            LENGTH * np.sin(shoulder) + LENGTH / 2 * np.sin(both),
        ),
    ):
        total += 0.5 * mass * (velocity[0] ** 2 + velocity[1] ** 2) + 0.5 * mass * inertia * speed**2
        total += mass * gravity * height
    return total


def derivative(motion, factors, torques, damping, gravity):
    """Return the equations of motion, from the mass matrix as a matrix and the Lagrangian's other terms."""
    shoulder, elbow, first, second = motion
    one, two, center, inertia = MASS * factors[0], MASS * factors[1], LENGTH / 2, LENGTH**2 / 12
    c, s = np.cos(elbow), np.sin(elbow)
    m11 = one * (center**2 + inertia) + two * (LENGTH**2 + center**2 + 2 * LENGTH * center * c + inertia)
    m12 = two * (center**2 + LENGTH * center * c + inertia)
    m22 = two * (center**2 + inertia)
    h = -two * LENGTH * center * s
    bias = np.array([h * second * first + h * (first + second) * second, -h * first * first])
    weight = gravity * np.array(
        [
            (one * center + two * LENGTH) * np.cos(shoulder) + two * center * np.cos(shoulder + elbow),
            two * center * np.cos(shoulder + elbow),
        ]
    )
    matrix = np.array([[m11 + ROTOR, m12], [m12, m22 + ROTOR]]).transpose(2, 0, 1)
    force = torques - bias - weight - damping * np.array([first, second])
    return np.concatenate((motion[2:], np.linalg.solve(matrix, force.T[..., None])[..., 0].T))


def reference(motion, seconds, *arguments, steps=2000):
    """Integrate with the classical Runge-Kutta method."""
    dt = seconds / steps
    for _ in range(steps):
        k1 = derivative(motion, *arguments)
        k2 = derivative(motion + dt / 2 * k1, *arguments)
        k3 = derivative(motion + dt / 2 * k2, *arguments)
        k4 = derivative(motion + dt * k3, *arguments)
        motion = motion + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return motion


def begun(rows=8, **arguments):
    env = MaskedArmVectorEnv(rows, **arguments)
    env.reset(seed=0)
    return env.dynamics, env.state


def advanced(dynamics, state, steps, actions):
    for _ in range(steps):
        state = dynamics.advance(HOST, state, None, actions)[0]
    return state


@pytest.mark.parametrize(("substeps", "tolerance"), [(4, 0.1), (64, 0.005)])
@pytest.mark.parametrize("gravity", [False, True])
def test_energy_is_kept_without_damping_and_torques(monkeypatch, gravity, substeps, tolerance):
    monkeypatch.setattr(masked_arm, "_SUBSTEPS", substeps)
    monkeypatch.setattr(masked_arm, "_SPEED", 100.0)  # the limit takes energy
    dynamics, state = begun(gravity=gravity)
    state["body"][2] = 0.0
    g = G if gravity else 0.0
    before = energy(state["motion"], state["body"], g)
    exchanged = 2 * MASS * LENGTH * G if gravity else before.max()  # the weight of the stretched arm
    exact = reference(state["motion"], 1.0, state["body"], np.zeros((2, 8)), 0.0, g)
    np.testing.assert_allclose(energy(exact, state["body"], g), before, rtol=1e-6, atol=1e-9)
    for _ in range(20):
        state = advanced(dynamics, state, 1, np.zeros((8, 2)))
        drift = np.abs(energy(state["motion"], state["body"], g) - before).max()
        assert drift < tolerance * exchanged


@pytest.mark.parametrize(("substeps", "tolerance"), [(4, 0.3), (256, 0.005)])
@pytest.mark.parametrize("gravity", [False, True])
def test_motion_is_that_of_a_finer_integrator(monkeypatch, gravity, substeps, tolerance):
    monkeypatch.setattr(masked_arm, "_SUBSTEPS", substeps)
    dynamics, state = begun(gravity=gravity)
    actions = np.random.default_rng(0).uniform(-0.3, 0.3, (8, 2))
    torques = actions.T * np.array([[6.0], [2.0]]) * state["body"][3]
    damping = 0.3 * state["body"][2]
    exact = reference(state["motion"], 0.2, state["body"], torques, damping, G if gravity else 0.0)
    assert 1.0 < np.abs(exact - state["motion"]).max() < 12.0
    found = advanced(dynamics, state, 4, actions)["motion"]
    np.testing.assert_allclose(found, exact, atol=tolerance)  # the method is of first order


@pytest.mark.parametrize("randomization", [0, 0.5, 1])
def test_bodies_are_drawn_within_their_ranges(randomization):
    body = MaskedArmVectorEnv(2000, randomization=randomization)
    body.reset(seed=0)
    device = TensorEnv(MaskedArm(randomization=randomization), 2000)
    device.reset(seed=0)
    for found in (body.state["body"], device.running["body"].numpy()):
        spread = randomization * np.array([0.5, 0.5, 0.75, 0.3])[:, None]
        assert (np.abs(found - 1) <= spread + 1e-12).all()
        assert (np.abs(found - 1).max(axis=1) >= 0.98 * spread[:, 0]).all()
    radius = np.linalg.norm(body.state["target"], axis=0)
    assert 0.2 <= radius.min() < 0.25
    assert 0.88 < radius.max() <= 0.9


def test_a_body_lasts_for_an_episode():
    env = GymEnv("recurl/MaskedArm-v0", 3, max_episode_steps=4)
    env.set_seed(0)
    seen = env.rollout(8, break_when_any_done=False)["privileged"][..., 2:]
    assert (seen[:, :4] == seen[:, :1]).all()
    assert (seen[:, 4:] == seen[:, 4:5]).all()
    assert (seen[:, 0] != seen[:, 4]).all()


def test_velocities_are_only_privileged():
    dynamics, state = begun()
    faster = {**state, "motion": state["motion"] + np.array([[0.0], [0.0], [1.0], [1.0]])}
    one, other = (dynamics.observe(HOST, given, None) for given in (state, faster))
    np.testing.assert_array_equal(one["observation"], other["observation"])
    np.testing.assert_allclose(other["privileged"][:, :2] - one["privileged"][:, :2], 1.0, atol=1e-6)


def test_a_perfect_reach_is_rewarded_with_nothing():
    dynamics, state = begun()
    state["motion"][2:] = 0.0
    shoulder, elbow = state["motion"][:2]
    tip = [np.cos(shoulder) + np.cos(shoulder + elbow), np.sin(shoulder) + np.sin(shoulder + elbow)]
    state["target"] = LENGTH * np.array(tip)
    reward = dynamics.advance(HOST, state, None, np.zeros((8, 2)))[1]
    np.testing.assert_allclose(reward, 0.0, atol=1e-9)
    reward = dynamics.advance(HOST, {**state, "target": state["target"] + [[3.0], [4.0]]}, None, np.zeros((8, 2)))[1]
    np.testing.assert_allclose(reward, -5.0, atol=1e-9)


@pytest.mark.parametrize("randomization", [-0.1, 1.1, "a", None, float("nan")])
def test_a_scale_out_of_range_is_refused(randomization):
    with pytest.raises(ArgumentError, match="randomization must be a number from 0 to 1; got"):
        MaskedArm(randomization=randomization)


def wrapped(angle):
    return (angle + np.pi) % (2 * np.pi) - np.pi


def poses(state, weight):
    """Return the nearer of the two poses that reach the target, with the shoulder's turn weighted."""
    (x, y), (shoulder, elbow, *_) = state["target"], state["motion"]
    bend = np.arccos(np.clip((x**2 + y**2) / (2 * LENGTH**2) - 1, -1, 1))
    both = [(np.arctan2(y, x) - sign * bend / 2, sign * bend) for sign in (1, -1)]
    turns = [np.stack((wrapped(one - shoulder), wrapped(two - elbow))) for one, two in both]
    far = [np.maximum(weight * np.abs(first), np.abs(second)) for first, second in turns]
    return state["motion"][:2] + np.where(far[0] < far[1], *turns)


def informed(goal, motion, body):
    """Return commands of the inverse dynamics, for accelerations that a spring and a damper would cause."""
    wanted = np.array([[59.0], [80.0]]) * (goal - motion[:2]) - np.array([[12.1], [14.5]]) * motion[2:]
    free = derivative(motion, body, np.zeros((2, motion.shape[1])), 0.3 * body[2], 0.0)[2:]
    unit = [derivative(motion, body, torque, 0.3 * body[2], 0.0)[2:] - free for torque in UNITS]
    torques = np.linalg.solve(np.array(unit).transpose(2, 1, 0), (wanted - free).T[..., None])[..., 0]
    return torques / (np.array([6.0, 2.0]) * body[3][:, None])


def springs(goal, motion, body):
    """Return commands proportional to the distance from the goal."""
    return (np.array([[1.1], [2.8]]) * (goal - motion[:2])).T / np.array([6.0, 2.0])


UNITS = (np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]]))


def mean_return(controller, weight, rows=300):
    env = MaskedArmVectorEnv(rows)
    env.reset(seed=0)
    goal, total = poses(env.state, weight), np.zeros(rows)
    for _ in range(200):
        total += env.step(np.clip(controller(goal, env.state["motion"], env.state["body"]), -1, 1))[1]
    return total.mean()


def test_returns_of_controllers_with_and_without_velocities():
    optimal, memoryless = MaskedArmVectorEnv.optimal_return(), MaskedArmVectorEnv.memoryless_return()
    assert optimal - 1 < mean_return(informed, 0.9) < optimal + 1
    assert memoryless - 3 < mean_return(springs, 2.9) < memoryless + 1


def test_returns_are_known_for_the_default_arguments_only():
    with pytest.raises(UnsupportedError, match="with its default arguments only"):
        MaskedArmVectorEnv.optimal_return(gravity=True)
