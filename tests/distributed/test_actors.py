"""Ranks whose collectors are actors: each rank has its own."""

import pytest
import torch

from recurl.trainers import RunFolder
from recurl.trainers.checkpoint import latest_checkpoint, load_checkpoint
from tests.distributed import runs
from tests.distributed.test_runs import rows, same_bits

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_each_rank_has_separate_actors(ray_cluster, ranks, tmp_path):
    options = {"collectors": "ray:1", "ray_address": ray_cluster.address, "total_steps": 192}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    results = ranks.run(2, runs.train, whole, **options)
    assert [result[:2] for result in results] == [("finished", 192)] * 2
    assert same_bits(results[0][3], results[1][3])
    assert {row["actors_replaced"] for row in rows(whole)} == {"0"}

    ranks.run(2, runs.train, cut, stop_after=3, **options)
    state = load_checkpoint(latest_checkpoint(RunFolder(cut).checkpoints))
    first, second = (part["algorithm"]["collector"]["workers"][0] for part in (state, *state["ranks"]))
    assert not torch.equal(first["rng"], second["rng"])
    resumed = ranks.run(2, runs.train, cut, resume=True)
    assert all(same_bits(result[3], results[0][3]) for result in resumed)
    assert rows(cut) == rows(whole)
