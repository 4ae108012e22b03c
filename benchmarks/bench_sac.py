"""Time of a gradient step of recurrent SAC, compared with TorchRL's SACLoss and SB3's memoryless SAC.

GRU 64, 2,048 tokens (64 slices of 32 steps, one end of an episode in each), one thread: losses of actor, critics and
temperature, their gradients and Adam, on the same data; CPU time of the process. TorchRL runs its own GRUModules; if
they fail, the error is in the table, with the times without vmap. SB3 takes 2,048 single transitions. All are measured
in turn, under the same conditions; appends to results/sac.csv. Usage::

    python benchmarks/bench_sac.py               # a minute
    python benchmarks/bench_sac.py --repeats 50
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from results_file import append, commit

RESULTS = Path(__file__).parent / "results" / "sac.csv"
ROWS, STEPS, OBS, ACTIONS, HIDDEN = 64, 32, 3, 1, 64


def main() -> None:
    """Measure all cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    check_tests()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases: dict[str, Callable[[], Callable[[], Any]]] = {
        "recurl, shared memory": lambda: sequences("recurl", shared=True),
        "recurl, two memories": lambda: sequences("recurl", shared=False),
        "torchrl, shared memory": lambda: sequences("torchrl", shared=True),
        "torchrl, two memories": lambda: sequences("torchrl", shared=False),
        "torchrl without vmap, shared memory": lambda: sequences("torchrl", shared=True, deactivate_vmap=True),
        "torchrl without vmap, two memories": lambda: sequences("torchrl", shared=False, deactivate_vmap=True),
        "sb3, no memory": sb3,
    }
    steps, errors = dict[str, Callable[[], Any]](), dict[str, str]()
    for name, make in cases.items():
        try:
            steps[name] = make()
            steps[name]()
        except Exception as error:  # noqa: BLE001 - the error of another library is reported
            errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            steps.pop(name, None)
    times = {name: list[float]() for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - begin))
    for name in cases:
        median = f"{statistics.median(times[name]):.2f}" if name in times else ""
        row = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "device": f"{platform.machine()} CPU"}
        row |= {"torch": torch.__version__, "case": name, "tokens": str(ROWS * STEPS), "ms": median}
        append(RESULTS, {**row, "error": errors.get(name, "")})
        print(f"{name:36} {median or '-':>8} ms  {errors.get(name, '')}", flush=True)


def check_tests() -> None:
    """Exit if the tests fail."""
    tests = Path(__file__).parents[1] / "tests" / "objectives" / "test_sac.py"
    if subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", str(tests)], check=False).returncode:
        sys.exit("The tests of SAC fail: no numbers before they pass.")


def data() -> TensorDict:
    """Return a batch of slices, ``[B, T]``, each with the end of an episode in the middle."""
    shape = (ROWS, STEPS)
    ends = torch.zeros(*shape, 1, dtype=torch.bool)
    ends[:, STEPS // 2] = True
    batch = TensorDict({"observation": torch.randn(*shape, OBS), "action": torch.rand(*shape, ACTIONS) - 0.5}, shape)
    batch["is_init"] = ends.roll(1, 1)
    batch["is_init"][:, 0] = True
    for name in ("actor_state", "critic_state"):
        batch[name] = torch.zeros(*shape, 1, HIDDEN)
    after = {"observation": torch.randn(*shape, OBS), "reward": torch.randn(*shape, 1)}
    after |= {"done": ends, "terminated": ends, "is_init": torch.zeros_like(ends)}
    batch["next"] = TensorDict(after, shape)
    for name in ("actor_state", "critic_state"):
        batch["next", name] = torch.zeros(*shape, 1, HIDDEN)
    return batch


def sequences(library: str, *, shared: bool, **more: Any) -> Callable[[], Any]:
    """Return a gradient step on sequences, with the modules of a library."""
    modules, objectives = (importlib.import_module(f"{library}.{part}") for part in ("modules", "objectives"))
    fast = {"recurrent_backend": "fastest"} if library == "recurl" else {}

    def memory(name: str) -> Any:
        keys = {"in_keys": ["observation", f"{name}_state", "is_init"]}
        keys["out_keys"] = [f"{name}_memory", ("next", f"{name}_state")]
        return modules.GRUModule(input_size=OBS, hidden_size=HIDDEN, **keys, **fast)

    actor_memory = memory("actor")
    critic_memory, source = (actor_memory, "actor") if shared else (memory("critic"), "critic")
    head = nn.Sequential(nn.Linear(HIDDEN, 2 * ACTIONS), modules.NormalParamExtractor())
    layer = TensorDictModule(head, in_keys=["actor_memory"], out_keys=["loc", "scale"])
    actor = modules.ProbabilisticActor(
        TensorDictSequential(actor_memory, layer), in_keys=["loc", "scale"], distribution_class=modules.TanhNormal
    )
    value = modules.MLP(in_features=HIDDEN + ACTIONS, out_features=1, num_cells=[64])
    top = TensorDictModule(value, in_keys=[f"{source}_memory", "action"], out_keys=["state_action_value"])
    options = {} if library == "recurl" else {"target_entropy": -float(ACTIONS), **more}
    loss = objectives.SACLoss(actor, TensorDictSequential(critic_memory, top), **options)
    loss.make_value_estimator(gamma=0.99)
    targets = objectives.SoftUpdate(loss, tau=0.01)
    optimizer = torch.optim.Adam([p for p in loss.parameters() if p.requires_grad], lr=1e-3, fused=True)
    batch = data()

    def step() -> None:
        with modules.set_recurrent_mode(True):
            losses = loss(batch.clone(False))
        optimizer.zero_grad()
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        optimizer.step()
        targets.step()

    return step


def sb3() -> Callable[[], Any]:
    """Return a gradient step of SB3's SAC on as many single transitions, with layers of 64."""
    if importlib.util.find_spec("stable_baselines3") is None:
        raise ModuleNotFoundError("pip install stable-baselines3")
    library = importlib.import_module("stable_baselines3")
    model = library.SAC(
        "MlpPolicy", "Pendulum-v1", batch_size=ROWS * STEPS, policy_kwargs={"net_arch": [64, 64]}, learning_starts=100
    )
    model.learn(200)
    return lambda: model.train(gradient_steps=1, batch_size=ROWS * STEPS)


if __name__ == "__main__":
    main()
