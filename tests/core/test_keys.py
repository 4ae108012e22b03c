import pytest

from recurl.core.keys import is_within


@pytest.mark.parametrize(
    ("key", "names", "within"),
    [
        ("action", ["action"], True),
        (("action", "move"), ["action"], True),
        (("action", "move", "x"), [("action", "move")], True),
        (("action", "move", "x"), ["action.move"], True),
        ("action_mask", ["action"], False),
        (("actions", "move"), ["action"], False),
        ("action", [("action", "move")], False),
        (("action", "moves"), [("action", "move")], False),
        ("reward", ["action", "reward"], True),
    ],
)
def test_a_key_is_within_itself_and_the_entries_that_hold_it(key, names, within):
    assert is_within(key, names) is within
