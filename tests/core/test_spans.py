import threading
import time

import pytest
import torch

from recurl.core.spans import ACTING, BACKWARD, OPTIMIZER, PARTS, REST, Spans, measured, span

CPU = torch.device("cpu")


def test_a_moment_belongs_to_the_innermost_span() -> None:
    start = time.perf_counter()
    with Spans(CPU) as spans:
        with span(OPTIMIZER):
            time.sleep(0.02)
            with span(BACKWARD):
                time.sleep(0.05)
            with span(BACKWARD):
                time.sleep(0.05)
        time.sleep(0.03)
    wall = time.perf_counter() - start
    found = spans.seconds()
    assert set(found) == {OPTIMIZER, BACKWARD, REST}
    assert set(found) <= set(PARTS)
    assert found[BACKWARD] >= 0.1
    assert found[OPTIMIZER] >= 0.02
    assert found[REST] >= 0.03
    assert 0 <= wall - sum(found.values()) < 0.01


def test_spans_end_with_an_error() -> None:
    with Spans(CPU) as spans:
        with pytest.raises(ValueError, match="wrong"), span(ACTING):
            raise ValueError("wrong")
        time.sleep(0.02)
    assert spans.seconds()[REST] >= 0.02


def test_other_threads_are_not_measured() -> None:
    def work() -> None:
        with span(ACTING):
            pass

    with Spans(CPU) as spans:
        other = threading.Thread(target=work)
        other.start()
        other.join()
    assert list(spans.seconds()) == [REST]


def test_nothing_is_measured_unless_requested() -> None:
    assert span(ACTING) is span(BACKWARD)


def test_a_function_is_measured_only_inside_spans() -> None:
    def wait(seconds: float) -> str:
        time.sleep(seconds)
        return "done"

    assert measured(ACTING, wait) is wait
    with Spans(CPU) as spans:
        assert measured(ACTING, wait)(0.01) == "done"
    assert spans.seconds()[ACTING] >= 0.01
