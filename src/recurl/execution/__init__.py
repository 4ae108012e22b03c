"""Execution of losses, estimators and policies in their fastest form: lowered, compiled or captured."""

from recurl.execution.executor import Backend, Executable, Form, compile, register  # noqa: A004 - as in torch.compile
from recurl.execution.explain import Explanation, NotCompiled

__all__ = ["Backend", "Executable", "Explanation", "Form", "NotCompiled", "compile", "register"]
