import resource

import pytest

from recurl.core.errors import ArgumentError, StorageError
from recurl.trainers.report.metrics import MetricsFile, read_metrics

FIELDS = ("update", "env_steps", "return_mean_20", "x")


def row(update):
    return {"update": update, "env_steps": 8 * update, "return_mean_20": float("nan"), "x": update / 3}


def write(path, updates, *, since=0, notify=pytest.fail, fields=FIELDS):
    metrics = MetricsFile(path, fields, updates=since, notify=notify)
    for update in updates:
        metrics.write({**row(update), **{name: 0.0 for name in fields if name not in FIELDS}})
    metrics.sync()
    metrics.close()
    return path.read_text()


def updates_in(path):
    return [int(row["update"]) for row in read_metrics(path)[1]]


def test_are_cut_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.csv"
    whole = write(path, range(1, 5))
    assert write(path, (3, 4), since=2) == whole
    assert updates_in(path) == [1, 2, 3, 4]
    assert list(tmp_path.iterdir()) == [path]


def test_are_never_rewritten_in_place(tmp_path):
    """Concurrent readers, and readers after a power loss, see either the complete old or the complete new file."""
    path = tmp_path / "metrics.csv"
    whole = write(path, range(1, 5))
    with path.open() as old:
        MetricsFile(path, FIELDS, updates=2, notify=pytest.fail).close()
        assert old.read() == whole
    assert updates_in(path) == [1, 2]
    inode = path.stat().st_ino
    MetricsFile(path, FIELDS, updates=2, notify=pytest.fail).close()
    assert path.stat().st_ino == inode  # no rows to drop


def test_a_row_is_there_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = MetricsFile(path, FIELDS, notify=pytest.fail)
    for update in (1, 2, 3):
        metrics.write(row(update))
        assert updates_in(path)[-1] == update
    metrics.close()


@pytest.mark.parametrize("left", ["", "update,env", "update,env_steps,return_mean_20,x\r\n", None])
def test_a_run_resumes_without_lost_rows(tmp_path, left):
    path, notices = tmp_path / "metrics.csv", []
    if left is not None:
        path.write_text(left)
    write(path, (4, 5), since=3, notify=notices.append)
    (notice,) = notices
    assert notice.startswith(f"{path} contains rows for 0 of the 3 updates before the checkpoint: the others are lost")
    assert updates_in(path) == [4, 5]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_row_that_was_cut_is_dropped(tmp_path, cut):
    path, notices = tmp_path / "metrics.csv", []
    whole = write(path, range(1, 5))
    path.write_text(whole[:-cut])
    write(path, (5,), since=4, notify=notices.append)
    assert updates_in(path) in ([1, 2, 3, 5], [1, 2, 5])
    assert len(notices) == 1


def test_remaining_rows_are_in_order(tmp_path):
    path, notices = tmp_path / "metrics.csv", []
    write(path, (1, 2, 2, 4, 3, 5, 9))
    write(path, (6, 7), since=5, notify=notices.append)
    assert updates_in(path) == [1, 2, 4, 5, 6, 7]
    assert "4 of the 5 updates" in notices[0]


def test_columns_of_another_version(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, (1, 2), fields=(*FIELDS, "old"))
    write(path, (3,), since=2, fields=("update", "env_steps", "new", "return_mean_20", "x"))
    fields, rows = read_metrics(path)
    assert fields == ["update", "env_steps", "new", "return_mean_20", "x", "old"]
    assert [(row["new"], row["old"]) for row in rows] == [("", "0.0"), ("", "0.0"), ("0.0", "")]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\n1,2\n", r"must have the columns update, env_steps, return_mean_20 of a run's metrics, got 'a,b'"),
        (b"\n\n\n", r"got ''"),
        (b"\xff\xfe\n", r"can't be read .*move it away; the run then continues with a new file"),
        (b'"' + b"x" * 200_000 + b"\n", r"must have the columns"),
        (None, r"can't be read .*it is a folder"),
    ],
)
def test_other_files_are_left_alone(tmp_path, content, said):
    path = tmp_path / "metrics.csv"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ArgumentError, match=said):
        MetricsFile(path, FIELDS, updates=1, notify=pytest.fail)
    assert content is None or path.read_bytes() == content


@pytest.mark.parametrize(
    "line", ["x,8,1.0,1", "1,x,1.0,1", "1,8,x,1", "1,8,1.0", "1,8,1.0,1,1", "-1,8,1.0,1", "1,0,1,1"]
)
def test_rows_that_are_none_are_left_out(tmp_path, line):
    path = tmp_path / "metrics.csv"
    write(path, (1,))
    text = path.read_text().splitlines()
    path.write_text("\n".join([text[0], line, "2,16,nan,1", ""]))
    assert updates_in(path) == [2]


def test_no_room(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = MetricsFile(path, FIELDS, notify=pytest.fail)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, before[1]))
    try:
        metrics.write(row(1))
        with pytest.raises(
            StorageError, match=r"Can't write .*metrics.csv \(File too large\): raise the file size limit"
        ):
            metrics.write(row(2))
        metrics.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert updates_in(path) == [1]
