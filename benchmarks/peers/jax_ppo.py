"""Recurrent PPO on masked CartPole in pure JAX, structured like PureJaxRL: one compiled update, environments included.

Needs only JAX. Positional arguments: environments, steps, LSTM width, epochs, minibatches, updates, scan unroll factor.
Prints the median rate of whole updates and of collection alone, and the learning curve.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

ENVS, STEPS, WIDTH, EPOCHS, MINIBATCHES, UPDATES, UNROLL = map(int, sys.argv[1:8])


def begin(key: Any, count: Any) -> Any:
    return jax.random.uniform(key, (count, 4), minval=-0.05, maxval=0.05)


def advance(key: Any, state: Any, clock: Any, action: Any) -> Any:
    """Step CartPole and reset the rows whose episode ended."""
    x, x_dot, theta, theta_dot = state.T
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    push = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    x_acc = push - 0.05 * theta_acc * cos / 1.1
    moved = [x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc]
    state, clock = jnp.stack(moved, -1), clock + 1
    done = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.2095) | (clock >= 500)
    state = jnp.where(done[:, None], begin(key, state.shape[0]), state)
    return state, jnp.where(done, 0, clock), done, clock


def parameters(key: Any) -> Any:
    keys = jax.random.split(key, 5)

    def orthogonal(key: Any, rows: Any, columns: Any, scale: Any) -> Any:
        return scale * jax.random.orthogonal(key, max(rows, columns))[:rows, :columns]

    def uniform(key: Any) -> Any:
        return jax.random.uniform(key, (WIDTH, 4 * WIDTH), minval=-(WIDTH**-0.5), maxval=WIDTH**-0.5)

    return {
        "encoder": orthogonal(keys[0], 2, WIDTH, 1.4),
        "encoder_bias": jnp.zeros(WIDTH),
        "w_ih": uniform(keys[1]),
        "w_hh": uniform(keys[2]),
        "bias": jnp.zeros(4 * WIDTH),
        "actor": orthogonal(keys[3], WIDTH, 2, 0.01),
        "critic": orthogonal(keys[4], WIDTH, 1, 1.0),
    }


def run(params: Any, states: Any, observations: Any, resets: Any) -> Any:
    """Apply the network to sequences [T, N, 2]; return last states, logits and values."""
    encoded = jnp.tanh(observations @ params["encoder"] + params["encoder_bias"])
    projected = encoded @ params["w_ih"] + params["bias"]

    def step(states: Any, inputs: Any) -> Any:
        gates, reset = inputs
        h, c = (jnp.where(reset[:, None], 0.0, state) for state in states)
        i, f, g, o = jnp.split(gates + h @ params["w_hh"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    states, features = jax.lax.scan(step, states, (projected, resets), unroll=min(UNROLL, len(projected)))
    return states, features @ params["actor"], (features @ params["critic"])[..., 0]


def act(carry: Any, _: Any) -> Any:
    params, state, clock, reset, states, key, stats = carry
    key, draw, begin_key = jax.random.split(key, 3)
    seen = state[:, ::2]
    states, logits, value = run(params, states, seen[None], reset[None])
    action = jax.random.categorical(draw, logits[0])
    log_prob = jax.nn.log_softmax(logits[0])[jnp.arange(ENVS), action]
    state, clock, done, length = advance(begin_key, state, clock, action)
    stats = (stats[0] + (done * length).sum(), stats[1] + done.sum())
    return (params, state, clock, done, states, key, stats), (seen, reset, action, log_prob, value[0], done)


def loss(params: Any, states: Any, batch: Any) -> Any:
    seen, resets, action, old_log_prob, advantage, target = batch
    _, logits, value = run(params, states, seen, resets)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = jnp.exp(log_prob - old_log_prob)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -gain.mean() + 0.5 * ((value - target) ** 2).mean()


def adam(learner: Any, gradient: Any) -> Any:
    """Clip the gradient norm to 0.5 and take an Adam step."""
    params, mean, square, count = learner
    norm = jnp.sqrt(sum((part**2).sum() for part in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda part: part * jnp.minimum(1.0, 0.5 / (norm + 1e-6)), gradient)
    count = count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, square, gradient)

    def step(p: Any, m: Any, v: Any) -> Any:
        return p - 1e-3 * (m / (1 - 0.9**count)) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-5)

    return jax.tree.map(step, params, mean, square), mean, square, count


def collect(params: Any, state: Any, clock: Any, reset: Any, states: Any, key: Any) -> Any:
    zero = jnp.zeros(())
    return jax.lax.scan(act, (params, state, clock, reset, states, key, (zero, zero)), None, STEPS, unroll=UNROLL)


@jax.jit
def update(carry: Any) -> Any:
    learner, state, clock, reset, first_states, key = carry
    collected, batch = collect(learner[0], state, clock, reset, first_states, key)
    _, state, clock, reset, states, key, stats = collected
    seen, resets, action, log_prob, value, done = batch
    last = run(learner[0], states, state[None, :, ::2], reset[None])[2][0]

    def gae(carry: Any, inputs: Any) -> Any:
        advantage, next_value = carry
        value, done = inputs
        delta = 0.02 + 0.99 * next_value * (1 - done) - value
        advantage = delta + 0.99 * 0.95 * (1 - done) * advantage
        return (advantage, value), advantage

    _, advantage = jax.lax.scan(gae, (jnp.zeros(ENVS), last), (value, done.astype(jnp.float32)), reverse=True)
    data = (seen, resets, action, log_prob, advantage, advantage + value)

    def epoch(carry: Any, _: Any) -> Any:
        learner, key = carry
        key, shuffle = jax.random.split(key)
        rows = jax.random.permutation(shuffle, ENVS).reshape(MINIBATCHES, -1)

        def step(learner: Any, index: Any) -> Any:
            minibatch = tuple(part[:, index] for part in data)
            gradient = jax.grad(loss)(learner[0], tuple(part[index] for part in first_states), minibatch)
            return adam(learner, gradient), None

        learner, _ = jax.lax.scan(step, learner, rows)
        return (learner, key), None

    (learner, key), _ = jax.lax.scan(epoch, (learner, key), None, EPOCHS)
    return (learner, state, clock, reset, states, key), stats[0] / jnp.maximum(stats[1], 1)


@jax.jit
def collect_alone(carry: Any) -> Any:
    learner, *rest = carry
    return collect(learner[0], *rest)[1][3].sum()


def main() -> None:
    key = jax.random.PRNGKey(0)
    params = parameters(key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    states = (jnp.zeros((ENVS, WIDTH)), jnp.zeros((ENVS, WIDTH)))
    learner = (params, zeros, zeros, jnp.zeros(()))
    carry = (learner, begin(key, ENVS), jnp.zeros(ENVS, jnp.int32), jnp.ones(ENVS, bool), states, key)
    start = time.perf_counter()
    jax.block_until_ready(update(carry))
    compiled = time.perf_counter() - start
    times, returns = [], []
    for _ in range(UPDATES):
        start = time.perf_counter()
        carry, mean = update(carry)
        jax.block_until_ready(carry)
        times.append(time.perf_counter() - start)
        returns.append(round(float(mean)))
    jax.block_until_ready(collect_alone(carry))
    alone = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(collect_alone(carry))
        alone.append(time.perf_counter() - start)
    whole, part = sorted(times)[len(times) // 2], sorted(alone)[2]
    rates = [ENVS * STEPS / seconds / 1e6 for seconds in (whole, part)]
    print(
        f"jax {jax.__version__} unroll {UNROLL}: update {whole * 1e3:.2f} ms = {rates[0]:.2f} M steps/s; collection "
        f"{part * 1e3:.2f} ms = {rates[1]:.2f} M steps/s; compiled in "
        f"{compiled:.1f} s; returns {returns[:: max(1, UPDATES // 6)]}"
    )


main()
