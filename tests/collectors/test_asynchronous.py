import pytest
import torch

from recurl.collectors.asynchronous import _current, joined
from recurl.core.errors import ArgumentError

X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"x": torch.ones(2, 4)},
            r"'x' is float32 \[2, 3\] for actor 0 and float32 \[2, 4\] for actor 1",
        ),
        ({"x": X.double()}, r"'x' is float32 \[2, 3\] for actor 0 and float64 \[2, 3\] for actor 1"),
        ({"x": X, "y": X}, "'y' is missing for actor 0 and float32"),
        ({}, r"'x' is float32 \[2, 3\] for actor 0 and missing for actor 1"),
    ],
)
@pytest.mark.parametrize("dim", [None, 0])
def test_batches_of_other_entries_are_refused(other, message, dim):
    with pytest.raises(ArgumentError, match=message):
        joined([{"x": X}, other], dim, "actors")


def test_states_of_older_versions():
    """Each kind of collector had its own format; see also test_overlapped.py and test_threaded.py."""
    versions = {"frames": 8, "version": 3, "sent": True, "replaced": 1}
    part = {"order": 4, "version": 2}
    actors = _current({**versions, "actors": ["a", "b"], "parts": [[{**part, "arrays": {"x": X}}], []]})
    assert (actors["workers"], actors["parts"]) == (["a", "b"], [[{**part, "entries": {"x": X}}], []])
    assert versions.items() <= actors.items()
    workers = _current({"frames": 8, "workers": ["a", "b"]})
    assert workers == {"frames": 8, "version": 0, "sent": False, "workers": ["a", "b"], "parts": [[], []]}
