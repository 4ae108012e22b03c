from results_file import append, commit


def test_rows_are_added_below_one_header(tmp_path):
    path = tmp_path / "results" / "table.csv"
    for row in ({"commit": commit(), "ms": "1.5"}, {"commit": commit(), "ms": ""}):
        append(path, row)
    assert path.read_bytes().decode() == f"commit,ms\n{commit()},1.5\n{commit()},\n"
    assert commit()
