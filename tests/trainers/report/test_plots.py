from recurl.trainers.report.plots import plot_learning_curve


def test_draws_a_picture(tmp_path):
    (tmp_path / "metrics.csv").write_text("update,env_steps,return_mean_20\n1,10,nan\n2,20,1.5\n")
    plot_learning_curve(tmp_path / "metrics.csv", tmp_path / "curve.png", title="demo")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
