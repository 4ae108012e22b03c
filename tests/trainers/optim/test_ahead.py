from recurl.trainers.optim.ahead import Ahead


def test_items_are_made_once_and_in_order_however_early():
    made = []

    def items():
        for item in range(5):
            made.append(item)
            yield item

    ahead, found = Ahead(items()), []
    ahead.fetch()
    ahead.fetch()
    assert made == [0]
    for item in ahead:
        found.append((item, list(made)))
        if item != 2:
            ahead.fetch()
    ahead.fetch()
    assert [item for item, _ in found] == list(range(5))
    assert found[1][1] == [0, 1]
    assert found[3][1] == [0, 1, 2, 3]
    assert list(ahead) == []


def test_none_is_an_item():
    ahead = Ahead([None, None])
    ahead.fetch()
    assert list(ahead) == [None, None]
