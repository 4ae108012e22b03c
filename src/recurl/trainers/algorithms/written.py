"""Options of a run as plain data, for readers that only need their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from typing import Any, Self

from recurl.core.errors import ArgumentError
from recurl.core.ranges import fields_of, shown
from recurl.trainers.algorithms.table import OPTIONS
from recurl.trainers.config import RunConfig, check_names_of, evaluation_task
from recurl.trainers.keyword_arguments import keyword_arguments

__all__ = ["WrittenOptions"]


@dataclass(frozen=True)
class WrittenOptions:
    """Options of a run as data: types and ranges are checked, but nothing they name is imported or created.

    Args:
        algorithm: name of the algorithm without its module.
        values: all options by name.

    Example:
        >>> options = WrittenOptions.read({"algorithm": "mine:own", "env": "recurl/TMaze-v0", "cell": "mine:Own"})
        >>> options.algorithm, options.cell, options.env_name, options.env_arguments
        ('own', 'mine:Own', 'recurl/TMaze-v0', {})
    """

    algorithm: str
    values: Mapping[str, Any]

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Read options from the output of an option dataclass's ``to_dict``, of any algorithm and version.

        Missing options get their default values. For an algorithm that isn't registered in this process, only the
        options shared by all algorithms are checked.

        Raises:
            ArgumentError: if an option is unknown, missing or invalid.
        """
        named = values.get("algorithm", "ppo")
        if not isinstance(named, str):
            raise ArgumentError(f"algorithm must be a name such as 'ppo', got {shown(named)}.")
        algorithm = named.rpartition(":")[2]
        kind = OPTIONS.get(algorithm, RunConfig)
        options = kind.complete(values)
        if kind is not RunConfig:
            check_names_of(kind, options)
        for field in fields_of(kind):
            if field.name in options:
                field.check(options[field.name])
            elif field.default is MISSING:
                raise ArgumentError(f"The option {field.name} is missing.")
            else:
                options[field.name] = field.default
        return cls(algorithm, options)

    @property
    def env_name(self) -> str:
        """Gymnasium id of the environment, or the name of the function or environment object."""
        return str(self.values["env"])

    @property
    def env_kwargs(self) -> tuple[str, ...]:
        """Arguments of the environment as name=value."""
        return self.values["env_kwargs"]

    @property
    def env_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the environment."""
        return keyword_arguments("--env-kwargs", self.env_kwargs)

    @property
    def cell(self) -> str:
        """Name of the cell."""
        return str(self.values["cell"])

    def for_evaluation(self) -> Self:
        """Return these options with the evaluation environment in place of the training environment."""
        names = ("env", "env_kwargs", "eval_env", "eval_env_kwargs")
        env, texts = evaluation_task(*(self.values[name] for name in names))
        task = dict(zip(names, (env, texts, None, ()), strict=True))
        return replace(self, values={**self.values, **task})

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in self.values.items()}
        return {"algorithm": self.algorithm, **plain}
