"""Craftax-Symbolic on a GPU: speed beside PureJaxRL's PPO-RNN from its own file, and learning curves.

``speed`` runs whole updates of both in one process, in turn: the same number of environments and steps, the same sizes
of layers, epochs and minibatches, new worlds at the same rate. The peer's time for learning is that of its update minus
that of an update without epochs. Appends to results/craftax.csv. The peer is ``ppo_rnn.py`` of
github.com/MichaelTMatthews/Craftax_Baselines; it needs craftax, distrax and orbax-checkpoint::

    python benchmarks/bench_craftax.py speed --peer Craftax_Baselines

``train`` trains one seed with the published settings of PPO on Craftax, or with the options of ``recurl train`` that
follow, and continues a run that was stopped; under torchrun, each rank has as many environments.
``curves`` appends the returns of such runs, also as a percentage of 226, to results/craftax_curves.csv::

    python benchmarks/bench_craftax.py train runs/craftax_0 --seed 0
    torchrun --nproc-per-node 4 benchmarks/bench_craftax.py train runs/craftax --total-steps 1e9 --minibatches 16
    python benchmarks/bench_craftax.py curves runs/craftax_*
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from recurl import __version__
from recurl.cli.sources import read_sources
from recurl.cli.train import read_run
from recurl.core.precision import torch_matmul_precision
from recurl.core.spans import ACTING, COLLECTION, ENVIRONMENT
from recurl.envs.jax_protocols import import_jax
from recurl.trainers import RunFolder
from recurl.trainers.algorithms.table import make_algorithm
from recurl.trainers.run.update_times import time_updates
from results_file import append, commit

RESULTS = Path(__file__).parent / "results"
ENV = "Craftax-Symbolic-v1"
ENVS, STEPS, EPOCHS, MINIBATCHES, WIDTH, RATIO = 1024, 128, 4, 8, 512, 16
LARGEST = 226  # sum of the rewards of all achievements
POINTS = 50  # rows per curve
OPTIONS = (
    f"--env jax:craftax/{ENV} --env-kwargs reset_ratio={RATIO} --num-envs {ENVS} --rollout-steps {STEPS} --cell gru "
    f"--hidden-size {WIDTH} --head-width {WIDTH} --head-layers 2 --shared-trunk --no-normalize-observations "
    "--no-scale-rewards --gamma 0.999 --gae-lambda 0.8 --entropy-coeff 0.002 --entropy-coeff-schedule constant "
    f"--learning-rate 2e-4 --epochs {EPOCHS} --minibatches {MINIBATCHES} --max-grad-norm 1.0 --clip-epsilon 0.2 "
    "--clip-value 0.2 --adam-eps 1e-5 --device cuda --logger none"
)
PEER = {
    "ENV_NAME": ENV,
    "NUM_ENVS": ENVS,
    "NUM_STEPS": STEPS,
    "NUM_MINIBATCHES": MINIBATCHES,
    "LAYER_SIZE": WIDTH,
    "USE_OPTIMISTIC_RESETS": True,
    "OPTIMISTIC_RESET_RATIO": RATIO,
    "LR": 2e-4,
    "ANNEAL_LR": False,
    "GAMMA": 0.999,
    "GAE_LAMBDA": 0.8,
    "ENT_COEF": 0.002,
    "VF_COEF": 0.5,
    "CLIP_EPS": 0.2,
    "MAX_GRAD_NORM": 1.0,
    "DEBUG": False,
    "USE_WANDB": False,
}


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("speed")
    one.add_argument("--peer", type=Path, required=True, help="folder with ppo_rnn.py")
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--updates", type=int, default=12, help="per round")
    one = commands.add_parser("train")
    one.add_argument("folder", type=Path)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--total-steps", type=float, default=1e8)
    one = commands.add_parser("curves")
    one.add_argument("folders", type=Path, nargs="+")
    for each in commands.choices.values():
        each.add_argument("--csv", type=Path)
        each.add_argument("--commit", default=commit(), help="what to write into the column 'commit'")
    args, args.options = parser.parse_known_args()
    if args.options and args.command != "train":
        parser.error(f"unknown options: {' '.join(args.options)}")
    {"speed": speed, "train": train, "curves": curves}[args.command](args)


def about(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "commit": args.commit,
        "recurl": __version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "unknown",
        "torch": torch.__version__,
        "jax": version("jax"),
        "craftax": version("craftax"),
    }


def speed(args: argparse.Namespace) -> None:
    """Measure updates of both programs in turn."""
    words = ["ppo", *OPTIONS.split()]
    config = read_run(words, read_sources(words), prog="bench_craftax.py").options
    ours: list[tuple[float, float]] = []
    peer: dict[int, list[float]] = {EPOCHS: [], 0: []}
    import_jax()
    with (
        ThreadPoolExecutor() as pool,
        torch_matmul_precision(config.torch_precision),
        closing(make_algorithm(config)) as learner,
    ):
        compiled = pool.map(lambda epochs: peer_program(args.peer, epochs, args.updates), peer)
        time_updates(learner, 5, 1)
        programs = dict(zip(peer, compiled, strict=True))
        for program in programs.values():  # warm up
            program()
        for _ in range(args.rounds):
            found = time_updates(learner, 1, args.updates)
            collecting = sum(found.parts.get(part, 0.0) for part in (ACTING, ENVIRONMENT, COLLECTION))
            ours.append((found.wall, found.wall - collecting))
            print(found, flush=True)
            for epochs, program in programs.items():
                peer[epochs].append(program() / args.updates)
    wall, learning = (statistics.median(column) for column in zip(*ours, strict=True))
    whole, collection = (statistics.median(peer[epochs]) for epochs in (EPOCHS, 0))
    row = {
        **about(args),
        "num_envs": ENVS,
        "rollout_steps": STEPS,
        "recurl_steps_per_s": round(ENVS * STEPS / wall),
        "peer_steps_per_s": round(ENVS * STEPS / whole),
        "recurl_learning_ms": round(learning * 1e3, 1),
        "peer_learning_ms": round((whole - collection) * 1e3, 1),
        "peer_collection_ms": round(collection * 1e3, 1),
        "times_in_all": round(whole / wall, 2),
        "times_in_learning": round((whole - collection) / learning, 2),
    }
    append(args.csv or RESULTS / "craftax.csv", row)
    print(", ".join(f"{key} {row[key]}" for key in list(row)[6:]), flush=True)


def peer_program(folder: Path, epochs: int, updates: int) -> Callable[[], float]:
    """Compile the peer's training and return a function that runs it and returns its seconds."""
    import jax  # noqa: PLC0415 - after recurl has set its memory

    sys.path.insert(0, str(folder))
    if "wandb" not in sys.modules and find_spec("wandb") is None:
        sys.modules["wandb"] = types.ModuleType("wandb")  # imported by the file, unused with these options
    import ppo_rnn  # noqa: PLC0415 # type: ignore[import-not-found]

    config = {**PEER, "UPDATE_EPOCHS": epochs, "TOTAL_TIMESTEPS": updates * ENVS * STEPS}
    program = jax.jit(ppo_rnn.make_train(config)).lower(jax.random.PRNGKey(0)).compile()

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(jax.random.PRNGKey(0)))
        return time.perf_counter() - begin

    return run


def train(args: argparse.Namespace) -> None:
    """Train one seed, from where it was stopped if it was."""
    if any(RunFolder(args.folder).checkpoints.glob("*")):
        words = ["--resume", str(args.folder)]
    else:
        own = f"{OPTIONS} --total-steps {args.total_steps:.0f} --seed {args.seed} --checkpoint-every 250 --overwrite "
        own += f"--eval-episodes 1 --eval-max-steps 100 --run-dir {args.folder}"
        name, options = "ppo", {"ppo": list[str]()}
        for word in [*own.split(), *args.options]:
            if word.startswith("--"):
                name, options[word] = word, []
            else:
                options[name].append(word)
        words = list(chain.from_iterable([name, *values] for name, values in options.items()))
    os.execv(sys.executable, [sys.executable, "-m", "recurl", "train", *words])


def curves(args: argparse.Namespace) -> None:
    """Write the curve of each run: means of the training episodes' returns between two rows."""
    for path in args.folders:
        folder = RunFolder(path)
        with folder.metrics.open(newline="") as file:
            updates = list(csv.DictReader(file))
        options = json.loads(folder.config.read_text())
        size, row = max(1, len(updates) // POINTS), dict[str, Any]()
        for end in range(size, len(updates) + 1, size):
            found = [float(row["return_mean_20"]) for row in updates[end - size : end] if row["return_mean_20"]]
            if not found:
                continue
            mean = statistics.fmean(found)
            last, steps = updates[end - 1], options["rollout_steps"]
            row = {
                **about(args),
                "num_envs": int(last["env_steps"]) // int(last["update"]) // steps,  # of all ranks
                "rollout_steps": steps,
                "seed": options["seed"],
                "env_steps": last["env_steps"],
                "return": round(mean, 3),
                "percent": round(mean / LARGEST * 100, 2),
            }
            append(args.csv or RESULTS / "craftax_curves.csv", row)
        print(path, *list(row.values())[-3:], flush=True)


if __name__ == "__main__":
    main()
