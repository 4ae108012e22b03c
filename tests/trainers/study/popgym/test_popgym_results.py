import math
from dataclasses import replace

import pytest

from recurl.core.errors import ArgumentError
from recurl.envs.tasks.popgym import POPGYM_TASKS
from recurl.experiments.popgym.results import Result, Results
from recurl.experiments.popgym.settings import SETTINGS, find_tasks, make_runs, options_text, setting
from recurl.experiments.popgym.summary import Summary

FIRST = Result(
    task="RepeatFirstEasy",
    cell="gru",
    seed=0,
    mmer=0.5,
    last=0.25,
    episodes=200,
    env_steps=1000,
    wall_s=1.5,
    setting="fast",
    budget=1000,
    options="epochs=4 gamma=0.9",
    device="a, CPU",
    versions="recurl 1",
    date="2020-01-01",
)
SAME = {"setting": "fast", "budget": 1000, "options": "epochs=4 gamma=0.9"}


def test_results_are_read_as_they_were_written(tmp_path):
    rows = [FIRST, replace(FIRST, seed=1, last=math.inf, cell="my:Cell(a=1, b='x')")]
    results = Results(tmp_path / "popgym.csv")
    for row in rows:
        results.add(row)
    again = Results(tmp_path / "popgym.csv")
    assert again.rows == rows
    again.check_setting(**SAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"setting": "paper"}, "its setting is fast, not paper"),
        ({"budget": 2000}, "its budget is 1000, not 2000"),
        ({"options": "epochs=5"}, "its options is epochs=4 gamma=0.9, not epochs=5.*another folder"),
    ],
)
def test_results_of_another_setting_are_refused(tmp_path, change, message):
    results = Results(tmp_path / "popgym.csv")
    results.check_setting(**SAME)
    results.add(FIRST)
    with pytest.raises(ArgumentError, match=message):
        results.check_setting(**{**SAME, **change})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("mmer", "score"), "must hold results of recurl bench popgym, with the columns task"),
        (lambda text: text.replace("mmer", "score"), "but it lacks mmer: restore them, or name another folder"),
        (lambda text: text.replace(",mmer", ",mmer,score", 1), "but it has others besides, or another order"),
        (lambda text: text.replace("0.5", "half"), "holds a row that can't be read .*half"),
        (lambda text: text[: text.index("fast")], r"holds a row that can't be read \(it has 9 entries, not 14\)"),
        (
            lambda text: text.replace("RepeatFirst", "RepeatLast"),
            r"can't be read \(there is no task 'RepeatLastEasy'\)",
        ),
        (lambda text: text + text.splitlines()[1], "one row per run, but holds two of RepeatFirstEasy gru seed 0"),
        (lambda text: text + '"', "is not a UTF-8 table .*unexpected end of data"),
        (lambda text: "", "must hold results"),
    ],
)
def test_other_files_are_refused(tmp_path, damage, message):
    path = tmp_path / "popgym.csv"
    Results(path).add(FIRST)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ArgumentError, match=message):
        Results(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "popgym.csv"
    Results(path).add(FIRST)
    path.write_bytes(path.read_bytes() + b"\xff\xfe\0")
    with pytest.raises(ArgumentError, match=r"is not a UTF-8 table .*fix or remove it"):
        Results(path)


def test_files_of_spreadsheets_are_read(tmp_path):
    path = tmp_path / "popgym.csv"
    Results(path).add(FIRST)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n\r\n")
    results = Results(path)
    assert results.rows == [FIRST]
    results.add(replace(FIRST, seed=1))
    assert Results(path).rows == [FIRST, replace(FIRST, seed=1)]


def scored(scores):
    return [
        replace(FIRST, task=task, cell=cell, seed=seed, mmer=value)
        for (task, cell), values in scores.items()
        for seed, value in enumerate(values)
    ]


def test_means_are_over_common_tasks_and_seeds(tmp_path):
    summary = Summary(
        scored(
            {
                ("RepeatFirstHard", "gru"): [0.9, 0.7],
                ("AutoencodeEasy", "gru"): [0.2],
                ("HigherLowerEasy", "gru"): [0.5],
                ("RepeatFirstHard", "none"): [0.1, 0.3],
                ("HigherLowerEasy", "none"): [0.5],
            }
        )
    )
    assert summary.tasks == ["AutoencodeEasy", "HigherLowerEasy", "RepeatFirstHard"]
    assert summary.common == ["HigherLowerEasy", "RepeatFirstHard"]
    assert summary.mean("gru")[0] == pytest.approx(0.65)
    assert summary.mean("none")[0] == pytest.approx(0.35)
    assert summary.unbeaten == ["HigherLowerEasy"]
    table = summary.table().splitlines()
    assert table[1].split() == ["AutoencodeEasy", "0.200", "-"]
    assert table[4].split() == ["mean", "of", "2", "of", "48", "tasks", "0.650", "0.350"]
    assert "unverified" in table[6]
    assert table[-1] == "No cell beats no memory: HigherLowerEasy"
    summary.draw(tmp_path / "popgym.png")
    assert (tmp_path / "popgym.png").read_bytes().startswith(b"\x89PNG")


def test_no_cell_hides_another():
    summary = Summary(scored({("HigherLowerEasy", cell): [0.5] for cell in ("gru", "lstm", "s5", "none")}))
    offsets = summary.offsets()
    assert offsets == pytest.approx([-0.3, -0.1, 0.1, 0.3])
    assert Summary(scored({("HigherLowerEasy", "gru"): [0.5]})).offsets() == [0.0]


def test_a_task_without_a_score_is_not_common():
    """If no episode of a run has ended, there still is a mean over the other tasks."""
    scores = {("RepeatFirstHard", "gru"): [math.nan], ("HigherLowerEasy", "gru"): [0.5]}
    summary = Summary(scored(scores | {("RepeatFirstHard", "none"): [0.3], ("HigherLowerEasy", "none"): [0.1]}))
    assert summary.common == ["HigherLowerEasy"]
    assert (summary.mean("gru")[0], summary.mean("none")[0]) == (0.5, 0.1)


def test_runs_are_every_task_of_a_cell_then_the_next():
    runs = make_runs(["RepeatFirstEasy", "MineSweeperHard"], ["gru", "lstm*2", "gru"], 2, setting("fast", {}), **SIZE)
    assert [run.key for run in runs[:5]] == [
        ("RepeatFirstEasy", "gru", 0),
        ("MineSweeperHard", "gru", 0),
        ("RepeatFirstEasy", "lstm*2", 0),
        ("MineSweeperHard", "lstm*2", 0),
        ("RepeatFirstEasy", "gru", 1),
    ]
    config = runs[3].config
    assert (config.cell, config.num_layers, config.env_name) == ("lstm", 2, "recurl/popgym-MineSweeperHard-v0")
    assert {options_text(run.config) for run in runs} == {options_text(runs[0].config)}


SIZE = {"budget": 10**7, "device": "cpu"}


def test_a_cell_is_one_column_however_it_is_written():
    runs = make_runs(["RepeatFirstEasy"], ["s5*1", "s5", "s5*01", "s5*02"], 1, setting("fast", {}), **SIZE)
    assert [(run.cell, run.config.cell, run.config.num_layers) for run in runs] == [("s5", "s5", 1), ("s5*2", "s5", 2)]
    spellings = ["gtrxl(window=8, heads=2)", "gtrxl( heads = 2,window = 8 )*1"]
    runs = make_runs(["RepeatFirstEasy"], spellings, 1, setting("fast", {}), **SIZE)
    assert [run.cell for run in runs] == spellings[:1]
    with pytest.raises(ArgumentError, match=r"--cells: none has no layers, got 'none\*4': write none"):
        make_runs(["RepeatFirstEasy"], ["none*4"], 1, setting("fast", {}), **SIZE)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_have_the_protocol_of_the_paper(name):
    (run,) = make_runs(["RepeatFirstEasy"], ["gru"], 1, setting(name, {}), **SIZE)
    config = run.config
    assert (config.hidden_size, config.gamma, config.previous_action) == (256, 0.99, True)
    if name == "paper":
        assert (config.num_envs, config.rollout_steps, config.epochs, config.minibatches) == (64, 1024, 30, 8)
        assert (config.learning_rate, config.gae_lambda, config.clip_epsilon) == (5e-5, 1.0, 0.2)


def test_changes_are_part_of_the_setting():
    (run,) = make_runs(["RepeatFirstEasy"], ["gru"], 1, setting("fast", {"epochs": 7}), **SIZE)
    assert "epochs=7" in options_text(run.config)
    with pytest.raises(ArgumentError, match=r"ppo has no option 'epoch'\. Did you mean epochs\?"):
        setting("fast", {"epoch": 7})
    with pytest.raises(ArgumentError, match="can't set seed, which the benchmark sets itself"):
        setting("fast", {"seed": 7})


def test_unknown_tasks_are_refused():
    with pytest.raises(ArgumentError, match=r"there is no task 'RepeatFirst2'\. Did you mean RepeatFirst\?"):
        find_tasks(["RepeatFirst2"])


def test_the_benchmark_has_all_tasks():
    assert len(find_tasks([])) == 48
    assert find_tasks(["LabyrinthEscape"]) == [f"LabyrinthEscape{level}" for level in ("Easy", "Medium", "Hard")]
    (run,) = make_runs(["LabyrinthEscapeEasy"], ["gru"], 1, setting("fast", {}), **SIZE)
    assert run.config.env_name == "recurl/popgym-LabyrinthEscapeEasy-v0"


def test_a_mean_says_over_which_tasks_it_is():
    without = [name for name in POPGYM_TASKS if not name.startswith("Labyrinth")]
    table = Summary(scored({(name, "gru"): [0.5] for name in without})).table()
    assert "mean of 42 of 48 tasks " in table
    assert table.endswith("Not in the mean, as a cell has no score: LabyrinthEscape, LabyrinthExplore")
    table = Summary(scored({(name, "gru"): [0.5] for name in POPGYM_TASKS})).table()
    assert "mean of 48 of 48 tasks " in table
    assert "Not in the mean" not in table
    assert Summary(scored({("HigherLowerEasy", "gru"): [0.5]})).left_out[4:7] == [
        *("HigherLowerMedium", "HigherLowerHard", "LabyrinthEscape")
    ]
