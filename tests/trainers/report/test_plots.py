from recurl.trainers.report.figure import Line, draw_returns
from recurl.trainers.report.plots import plot_learning_curve


def test_draws_a_picture(tmp_path):
    (tmp_path / "metrics.csv").write_text("update,env_steps,return_mean_20\n1,10,nan\n2,20,1.5\n")
    plot_learning_curve(tmp_path / "metrics.csv", tmp_path / "curve.png", title="demo", references={})
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_shows_evaluations_spread_and_references(tmp_path):
    header = "update,env_steps,return_mean_20,return_std_20\n"
    rows = "".join(f"{n},{10 * n},{n / 50},0.5\n" for n in range(1, 101))
    (tmp_path / "metrics.csv").write_text(header + rows)
    (tmp_path / "evaluations.csv").write_text("update,env_steps,eval_return,eval_return_std\n50,500,1.0,0.1\n")
    plot_learning_curve(
        tmp_path / "metrics.csv",
        tmp_path / "curve.svg",
        title="demo",
        evaluations=tmp_path / "evaluations.csv",
        references={"optimum": 1.0, "best without memory": 0.25},
    )
    drawn = (tmp_path / "curve.svg").read_text()
    for label in ("training return", "evaluation return", "optimum", "best without memory", "demo"):
        assert f"<!-- {label} -->" in drawn  # matplotlib draws text as paths, below a comment


def test_a_run_without_an_episode_has_an_empty_picture(tmp_path):
    (tmp_path / "metrics.csv").write_text("update,env_steps,return_mean_20\n1,10,nan\n")
    plot_learning_curve(tmp_path / "metrics.csv", tmp_path / "curve.png", title="demo", references={"optimum": 1.0})
    plot_learning_curve(tmp_path / "metrics.csv", tmp_path / "bare.png", title="demo", references={})
    assert (tmp_path / "bare.png").exists()


def test_has_colours_for_many(tmp_path):
    lines = [Line(str(n), [0, 1], [n, n], [n, n], [n, n]) for n in range(20)]
    draw_returns(tmp_path / "many.pdf", lines, title="many", ylabel="return", references={})
    assert (tmp_path / "many.pdf").read_bytes().startswith(b"%PDF")
