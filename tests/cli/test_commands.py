"""Random command lines generated from the option fields: none ends in a traceback, and small ones run."""

import random
from itertools import pairwise, product

import pytest

from recurl.cli import main
from recurl.core.ranges import flag
from torture_kinds.command_lines import KINDS, check, commands, edges, leaf_fields
from torture_kinds.forks import MOST_LINES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves")]

LEFT = {
    "drop_observations",
    "encoder",
    "image_layout",
    "print_model",
    "env_kwargs",
    "wrapper",
    "env_workers",
    "env_groups",
    "total_steps",
    "device",
    "run_dir",
    "overwrite",
    "cuda_graph",
    "compile",
    "overlap",
    "collectors",
    "ray_address",
    "max_lag",
    "stop_return",
    "preset",
    "config",
    "save_config",
    "callback",
    "logger",
    "eval_env",
    "eval_env_kwargs",
    "init_from",
    "reset_memory_at",
    "trial_episodes",
    "critic_observations",
    "symmetry",
    "stop_eval_return",
    "keep_best",
}
ENVS = {"td3": ["recurl/MaskedPendulum-v1"]}
SMALL = {
    "env": ["recurl/TMaze-v0", "recurl/RepeatPrevious-v0", "CartPole-v1"],
    "encoder_width": [1, 8],
    "encoder_layers": [1, 3],
    "head_width": [0, 4],
    "head_layers": [1, 2],
    "vectorization": ["auto", "native", "sync"],
    "action_mask": ["action_mask", "none"],
    "hidden_size": [1, 2, 8],
    "num_layers": [1, 2],
    "backend": ["fastest", "auto", "loop", "pad"],
    "num_envs": [1, 2, 3],
    "rollout_steps": [1, 4, 9],
    "eval_episodes": [1, 2],
    "eval_every": [1, 50],
    "threads": [1, 2],
    "buffer_size": [64, 1000],
    "learning_starts": [0, 4, 100],
    "slices": [1, 3],
    "slice_length": [1, 4, 64],
    "burn_in": [0, 3],
    "n_steps": [1, 5, 2**31 - 1],
    "gradient_steps": [1, 2],
    "epochs": [1, 2],
    "minibatches": [1, 2],
    "sequence_length": [1, 4, 100],
    "learning_rate": [1e-12, 1e-3],
    "max_grad_norm": [1e-9, 1.0, "inf"],
    "critic_coeff": [0.0, 0.5, 100.0],
    "entropy_coeff": [0.0, 0.01, 1.0],
    "checkpoint_every": [1, 2**31 - 1],
    "seed": [0, 2**32, 2**63 - 1],
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_random_commands_are_accepted_or_refused_in_a_few_lines(seed, tmp_path):
    ends = {"accepted": 0, "helped": 0, "refused": 0}
    for arguments in commands(100, seed, tmp_path):
        said = check(arguments)  # raises if there would be a traceback
        assert len(said.splitlines()) <= MOST_LINES
        ends[said if said in ends else "refused"] += 1
    assert ends["accepted"] > 20
    assert ends["refused"] > 20


def trains(out, generator):
    """Random valid command lines train for one small batch."""
    while True:
        command = generator.choice([words for words in KINDS if len(words) == 2 and words[0] == "train"])
        words = ["--run-dir", str(out)]
        for field in leaf_fields(KINDS[command]):
            if field.name in LEFT or (field.name not in SMALL and generator.random() < 0.6):
                continue
            if field.kind is bool:
                words.append(flag(field.name if generator.random() < 0.5 else f"no-{field.name}"))
            else:
                small = ENVS.get(command[1]) if field.name == "env" else None
                values = (
                    small or SMALL.get(field.name) or field.choices or edges(field.range, field.kind, outside=False)
                )
                words += [flag(field.name), str(generator.choice(values))]
        chosen = dict(pairwise(words))
        steps = int(chosen["--num-envs"]) * int(chosen["--rollout-steps"])
        arguments = [*command, *words, "--total-steps", str(steps)]
        if check(arguments) == "accepted":
            return arguments


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 18))])
def test_accepted_commands_train(seed, tmp_path, capsys):
    assert main(trains(tmp_path / "run", random.Random(seed))) == 0, capsys.readouterr().err
    assert "Greedy evaluation" in capsys.readouterr().out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(trains(folder, random.Random(99))) == 0
    return folder


EVALUATIONS = [["evaluate", "--episodes", *words] for words in product(["1", "3"], ["--seed"], ["0", str(2**63 - 1)])]
TIMINGS = [
    ["bench", "rnn", "--hidden-size", hidden, "--time", time, "--batch", batch]
    for hidden, time, batch in product("13", repeat=3)
]


@pytest.mark.parametrize(
    "words", [["train", "--resume"], ["doctor", "--steps", "8"], *EVALUATIONS, *TIMINGS], ids=" ".join
)
def test_accepted_commands_read(run, words, tmp_path, capsys):
    """Random command lines of the commands that resume, diagnose, evaluate and time."""
    bench = [
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--backends",
        "loop",
        "--threads",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    more = bench if words[0] == "bench" else [str(run)]
    assert main([*words, *more]) == 0, capsys.readouterr().err
