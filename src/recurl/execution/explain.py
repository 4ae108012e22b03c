"""Explanations of what runs in which form, and why not in a faster one."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Explanation", "NotCompiled", "reason_of"]


class NotCompiled(Exception):
    """Raised where a faster form of a function can't run; the message is the reason."""


class Explanation(dict[str, str | None]):
    """The faster forms of a computation, fastest first, each with the reason why it isn't used, or None if it is.

    Attributes:
        what: the computation.
        otherwise: name of the form that always works.

    Example:
        >>> found = Explanation("steps", {"in place": "actions are masked", "cpp": None, "tensors": None})
        >>> found.form, found["in place"]
        ('cpp', 'actions are masked')
        >>> print(found)
        steps: cpp (not in place: actions are masked)
    """

    def __init__(self, what: str, forms: dict[str, str | None], otherwise: str = "TensorDicts") -> None:
        super().__init__(forms)
        self.what, self.otherwise = what, otherwise

    @property
    def form(self) -> str:
        """Name of the fastest form that is used."""
        return next((name for name, reason in self.items() if reason is None), self.otherwise)

    def __str__(self) -> str:
        missing: dict[str, list[str]] = {}
        for name, reason in self.items():
            if reason is None:
                break
            missing.setdefault(reason, []).append(name)
        said = "; ".join(f"not {' or '.join(names)}: {reason}" for reason, names in missing.items())
        return f"{self.what}: {self.form}{f' ({said})' if said else ''}"


def reason_of(attempt: Callable[[], object]) -> str | None:
    """Return the reason why ``attempt`` raises :class:`NotCompiled`, or None if it doesn't.

    Example:
        >>> def attempt():
        ...     raise NotCompiled("it draws random numbers")
        >>> reason_of(attempt)
        'it draws random numbers'
    """
    try:
        attempt()
    except NotCompiled as reason:
        return str(reason)
    return None
