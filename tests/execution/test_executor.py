"""Methods run in the forms registered for their class."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from recurl.core.errors import ArgumentTypeError
from recurl.execution import Form, NotCompiled, compile, register  # noqa: A004 - the name of torch.compile


def make() -> Any:
    class Sum:
        def run(self, x: int) -> int:
            return x + x

    return Sum


def times(factor: int) -> Any:
    return lambda run: lambda x: factor * run(x)


def test_a_form_does_not_serve_another_class_of_the_same_name() -> None:
    first, second = make(), make()
    assert first.__qualname__ == second.__qualname__
    register(first, "run", Form("ten", times(10)))
    assert compile(first().run)(1) == 20
    assert compile(second().run)(1) == 2
    register(second, "run", Form("hundred", times(100)))
    assert [compile(cls().run)(1) for cls in (first, second)] == [20, 200]


def test_a_form_of_the_same_name_is_replaced() -> None:
    cls = make()
    for factor in (10, 100):
        register(cls, "run", Form("fast", times(factor)))
    run: Any = compile(cls().run)
    assert run(1) == 200
    assert run.explain() == {"fast": None}


def test_forms_of_a_class_and_of_its_base_may_have_one_name() -> None:
    def refuse(run: object) -> Any:
        raise NotCompiled("it is too small")

    class Own(make()):  # type: ignore[misc] - made here
        pass

    register(Own.__base__, "run", Form("fast", times(10)))
    register(Own, "run", Form("fast", refuse))
    run: Any = compile(Own().run)
    assert run(1) == 20
    assert run.explain() == {"fast of Own": "it is too small", "fast of Sum": None}


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"compile takes a method, such as loss.gradients, got 3\."):
        compile(3)  # type: ignore[type-var]


class Counted:
    """Defined at the top of the module, so that it can be pickled."""

    def __init__(self) -> None:
        self.calls = 0

    def run(self, x: int) -> int:
        self.calls += 1
        return x


class Unpicklable:
    """A form that holds memory."""

    def __init__(self, run: Any) -> None:
        self._run, self._memory = run, memoryview(b"")

    def __call__(self, x: int) -> int:
        return 10 * self._run(x)


register(Counted, "run", Form("fast", Unpicklable))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))])
def test_a_copy_builds_its_own_forms(copied: Any) -> None:
    counted = Counted()
    run: Any = compile(counted.run)
    assert run(1) == 10
    other = copied(run)
    assert other(2) == 20
    assert other.explain() == {"fast": None}
    assert counted.calls == 1
