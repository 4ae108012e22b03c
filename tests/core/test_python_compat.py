"""Each private name of CPython that recurl uses still behaves as recurl expects."""

import asyncio
import inspect
import sys
from types import ModuleType

from recurl.core import python_compat
from recurl.core.python_compat import is_import_statement, running_loop


def test_running_loop():
    async def run() -> list[bool]:
        loop = asyncio.get_running_loop()
        return [find() is loop for find in (running_loop, python_compat._running_loop)]

    assert running_loop() is python_compat._running_loop() is None
    assert asyncio.run(run()) == [True, True]


def test_is_import_statement(monkeypatch):
    seen = []
    module = ModuleType("asked")

    def find(name: str) -> int:
        seen.append(is_import_statement(inspect.currentframe().f_back))
        return 1

    module.__getattr__ = find
    monkeypatch.setitem(sys.modules, "asked", module)
    from asked import name

    assert name == module.other == 1
    assert seen == [True, False]
    assert not is_import_statement(None)
