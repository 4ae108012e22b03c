"""The programs of the documents that recurl implements run, and the claims of the documents hold."""

from __future__ import annotations

import itertools

import pytest

from tests.docs.seed_programs import overview, pomdp_guide, pomdp_ppo, reference_pages, sequence_batches

pytestmark = pytest.mark.slow


def test_overview() -> None:
    overview.main()


def test_pomdp_guide() -> None:
    pomdp_guide.main(frames_per_batch=512, batches=1)


def test_pomdp_ppo() -> None:
    losses = pomdp_ppo.main(total_frames=1024, frames_per_batch=256)
    assert len(losses) == 4


def test_reference_pages() -> None:
    reference_pages.main()


def test_sequence_batches() -> None:
    losses = sequence_batches.main(updates=6)
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
