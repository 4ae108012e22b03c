from __future__ import annotations

import contextlib

import pytest

from recurl.core.errors import ArgumentError
from recurl.experiments.memory.sizes import TOLERANCE, count_parameters, equal_size, nearest_size
from recurl.experiments.memory.suites import SUITES, TUNED_ON, find_tasks, make_runs
from recurl.experiments.popgym.settings import setting
from recurl.trainers.algorithms.table import make_algorithm

SMALL = {"encoder_width": 16, "head_width": 16, "hidden_size": 96, "num_envs": 4, "minibatches": 2}


def runs(*cells, tasks=("TMaze10",), suite="core", **changes):
    changes = {**SMALL, **changes}
    options = setting("fast", changes)
    found = find_tasks(suite, tasks)
    return make_runs(found, cells, 1, options, changes=changes, steps=None, device="cpu")


def counts(config, size):
    """Return the numbers of parameters of the sizes around one, of those that the cell accepts."""
    for other in range(size - 8, size + 9):
        with contextlib.suppress(ArgumentError):
            yield count_parameters(config, other)


@pytest.mark.parametrize("cell", ["gru", "lstm", "mingru", "s5*2", "gtrxl(window=4)", "none"])
def test_policies_have_equally_many_parameters(cell):
    (run,) = runs(cell)
    size, wanted = equal_size(run.config)
    found = count_parameters(run.config, size)
    if abs(found / wanted - 1) > TOLERANCE:  # no accepted size is nearer
        assert all(abs(other - wanted) >= abs(found - wanted) for other in counts(run.config, size))
    assert (cell != "gru") or (size, found) == (96, wanted)


def test_the_count_is_that_of_the_trained_policy():
    (run,) = runs("lstm")
    agent = make_algorithm(run.config).agent
    assert count_parameters(run.config, 96) == sum(parameter.numel() for parameter in agent.parameters())


def test_coarse_sizes_are_preferred_where_they_are_near_enough():
    assert nearest_size(lambda size: size**2, 9120, 64) == 96
    assert nearest_size(lambda size: size**2, 100**2, 64) == 100
    assert nearest_size(lambda size: 7 * size, 7, 64) == 1


def test_sizes_that_a_cell_refuses_are_passed_over():
    def count(size):
        if size % 6:
            raise ArgumentError("hidden_size must be divisible by 6 heads")
        return size**2

    assert nearest_size(count, 61**2, 64) == 60
    with pytest.raises(ArgumentError, match="no size at all"):
        nearest_size(lambda size: (_ for _ in ()).throw(ArgumentError("no size at all")), 100, 16)


def test_sequences_cover_the_span_and_batches_are_equally_large():
    made = make_runs(
        list(SUITES["core"].values()), ["gru"], 1, setting("fast", {}), changes={}, steps=None, device="cpu"
    )
    assert {run.config.frames_per_batch for run in made} == {32_768}
    assert all(run.config.sequence_length == SUITES["core"][run.task].span for run in made)
    by_name = {run.task: run.config for run in made}
    assert by_name["TMaze1000"].rollout_steps == 2048
    assert by_name["RepeatPrevious512"].env_arguments == {"k": 512, "episode_length": 1024}


def test_what_options_were_tuned_on_is_not_scored():
    assert {name for tasks in SUITES.values() for name, task in tasks.items() if not task.is_scored} == set(TUNED_ON)
    assert len(SUITES["popgym"]) == 48
