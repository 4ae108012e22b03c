"""Environments written in JAX: steps per second of JaxEnv beside pure JAX, with random actions.

Three ways in one process, in turn, so that they share a machine's conditions: JaxEnv (a collector's loop of step and
reset, actions drawn by torch), one jitted step per call, and a rollout in ``lax.scan``, which launches many steps at
once. All reset the rows that finish, with as many new episodes per step. Appends to results/jax_env.csv. Usage::

    python benchmarks/bench_jax_env.py                                                            # gymnax, any device
    python benchmarks/bench_jax_env.py --envs craftax/Craftax-Symbolic-v1 --reset-ratio 16 --device cuda
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from recurl import __version__
from recurl.core.devices import cpu_name
from recurl.envs import interact
from recurl.envs.jax_named import named_jax_env
from recurl.envs.jax_protocols import jax_device, protocol_of
from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "jax_env.csv"
SCAN = 64  # steps of a rollout in lax.scan


def main() -> None:
    """Measure every environment at every size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["gymnax/CartPole-v1", "gymnax/Breakout-MinAtar"])
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1024])
    parser.add_argument("--reset-ratio", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="per way and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=commit(), help="what to write into the column 'commit'")
    args = parser.parse_args()
    torch.set_num_threads(1)  # on a CPU, threads of torch that wait for work would slow down those of JAX
    for name in args.envs:
        for num_envs in args.num_envs:
            measure(name, num_envs, args)


def measure(name: str, num_envs: int, args: argparse.Namespace) -> None:
    env = named_jax_env(f"jax:{name}", num_envs, device=args.device, reset_ratio=args.reset_ratio)
    ways = {"recurl": recurl_steps(env), **jax_steps(env, -(-num_envs // args.reset_ratio))}
    for run in ways.values():  # compile
        run(SCAN)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, run in ways.items():
            begin, steps = time.perf_counter(), 0
            while (spent := time.perf_counter() - begin) < args.seconds:
                run(SCAN)
                steps += SCAN * num_envs
            rates[way].append(steps / spent)
    medians = {way: statistics.median(found) for way, found in rates.items()}
    gpu = torch.device(args.device).type != "cpu"
    row = {
        "commit": args.commit,
        "recurl": __version__,
        "device": torch.cuda.get_device_name() if gpu else cpu_name(),
        "torch": torch.__version__,
        "jax": version("jax"),
        "package": f"{name.partition('/')[0]} {version(name.partition('/')[0])}",
        "env": name.partition("/")[2],
        "num_envs": num_envs,
        "reset_ratio": args.reset_ratio,
        **{f"{way}_steps_per_s": round(rate) for way, rate in medians.items()},
        "of_jit": round(medians["recurl"] / medians["jit"], 3),
        "of_scan": round(medians["recurl"] / medians["scan"], 3),
    }
    append(args.csv, row)
    print(", ".join(f"{key} {row[key]}" for key in list(row)[6:]), flush=True)


def recurl_steps(env: Any) -> Callable[[int], None]:
    root = [env.reset(seed=0)]

    def run(steps: int) -> None:
        root[0] = interact(env, None, root[0], steps, write=lambda *_: None)
        root[0]["done"].any().item()  # wait

    return run


def actions_of(space: Any, count: int) -> Callable[[Any], Any]:
    import jax  # noqa: PLC0415 - as below

    if hasattr(space, "n"):
        return lambda key: jax.random.randint(key, (count,), 0, int(space.n))
    return lambda key: jax.random.uniform(key, (count, *space.shape), minval=space.low, maxval=space.high)


def jax_steps(env: Any, fresh: int) -> dict[str, Callable[[int], None]]:
    """Return rollouts of the environment's own functions, which keep rewards and observations as a learner would."""
    import jax  # noqa: PLC0415 - after recurl has set its memory
    from jax import numpy as jnp  # noqa: PLC0415 - as above

    jax.config.update("jax_default_device", jax_device(env.device))
    protocol, count = protocol_of(env.env, env.params), env.batch_size.numel()
    draw = actions_of(protocol.action_space, count)

    def step(carry: Any, _: Any) -> Any:
        key, state = carry
        key, step_key, action_key, reset_key = jax.random.split(key, 4)
        keys = jax.random.split(step_key, count)
        state, observed, reward, terminated, truncated = jax.vmap(protocol.advance)(keys, state, draw(action_key))
        done = terminated | truncated
        new, first = jax.vmap(protocol.begin)(jax.random.split(reset_key, fresh))
        if fresh < count:
            number = (jnp.cumsum(done) - 1) % fresh
            new, first = jax.tree.map(lambda leaf: leaf[number], (new, first))

        def merge(one: Any, other: Any) -> Any:
            return jnp.where(done.reshape(-1, *[1] * (jnp.ndim(other) - 1)), one, other).astype(other.dtype)

        state, root = jax.tree.map(merge, (new, first), (state, observed))
        return (key, state), (root, reward, done)

    def begin(key: Any) -> Any:
        return key, jax.tree.map(jnp.asarray, jax.vmap(protocol.begin)(jax.random.split(key, count))[0])

    one = jax.jit(step)
    many = jax.jit(lambda carry: jax.lax.scan(step, carry, None, SCAN))
    carries = dict.fromkeys(("jit", "scan"), one(jax.jit(begin)(jax.random.PRNGKey(0)), None)[0])

    def jitted(steps: int) -> None:
        for _ in range(steps):
            carries["jit"], _ = one(carries["jit"], None)
        jax.block_until_ready(carries["jit"])

    def scanned(steps: int) -> None:
        for _ in range(steps // SCAN):
            carries["scan"], found = many(carries["scan"])
        jax.block_until_ready((carries["scan"], found))

    return {"jit": jitted, "scan": scanned}


if __name__ == "__main__":
    main()
