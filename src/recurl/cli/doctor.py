"""``recurl doctor``: what runs on this machine, and whether a recurrent policy is wired as it must be."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from recurl.diagnostics import CheckResult, check_wiring, machine_report
from recurl.envs import EnvBase, GymEnv
from recurl.errors import ArgumentError, RecurlError
from recurl.trainers import RunFolder, load_agent, make_env
from recurl.trainers.config import keyword_arguments

_DESCRIPTION = """\
Without arguments: which backends run on this machine, and why not, the precision, and versions. With a policy and an
environment, or a run: check by experiment that the policy's memory works; exit code 1 when a check fails.
"""
_ROWS = 4


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (see {self.prog} --help)")


def doctor_command(arguments: list[str]) -> int:
    """Print the machine's table, or check a policy's wiring."""
    wanted = _parser().parse_args(arguments)
    if wanted.run is None and wanted.env is None and wanted.policy is None:
        print(machine_report())
        return 0
    if (wanted.run is None) == (wanted.env is None) or (wanted.env is None) != (wanted.policy is None):
        raise ArgumentError("Name a run, or both --env and --policy (see recurl doctor --help).")
    policy, env = _from_run(wanted.run) if wanted.run is not None else _from_names(wanted)
    register = wanted.auto_register_policy_transforms
    if register is None:
        register = ":" not in (wanted.env or "")
    with env:
        results = check_wiring(policy, env, wanted.steps, auto_register_policy_transforms=register)
    print("\n".join(map(str, results)))
    print(_verdict(results))
    return 0 if all(result.passed for result in results) else 1


def _verdict(results: list[CheckResult]) -> str:
    failed = [result.name for result in results if not result.passed]
    if failed:
        return f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}; begin with the first"
    return f"all {len(results)} checks passed" if len(results) > 1 else "passed"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="recurl doctor", description=_DESCRIPTION)
    parser.add_argument("run", nargs="?", metavar="RUN", help="folder of a run: check its policy and environment")
    parser.add_argument("--env", help="gymnasium id, or module:function that makes an environment of recurl")
    parser.add_argument("--num-envs", type=int, help="rows of the environment (default: a single one)")
    parser.add_argument(
        "--env-kwargs", nargs="*", default=[], metavar="name=value", help="arguments of the environment, such as k=8"
    )
    parser.add_argument("--policy", help="module:function that makes the policy: function() or function(env)")
    parser.add_argument("--steps", type=int, default=64, help="steps of every row to collect (default: 64)")
    parser.add_argument(
        "--auto-register-policy-transforms",
        action=argparse.BooleanOptionalAction,
        help="append the tracker and the primers that are missing, as a collector does by default (default: yes for a "
        "gymnasium id, no for module:function, whose wiring is checked as it is)",
    )
    return parser


def _from_run(folder: str) -> tuple[Any, EnvBase]:
    config, agent = load_agent(RunFolder(Path(folder)))
    return agent.policy, make_env(config, min(config.num_envs, _ROWS), policy=agent.policy)


def _from_names(wanted: argparse.Namespace) -> tuple[Any, EnvBase]:
    options = keyword_arguments("--env-kwargs", wanted.env_kwargs)
    if ":" in wanted.env:
        rows = {} if wanted.num_envs is None else {"num_envs": wanted.num_envs}
        env = _call("--env", wanted.env, _find("--env", wanted.env), **rows, **options)
        if not isinstance(env, EnvBase):
            raise ArgumentError(f"--env {wanted.env} must make an environment of recurl, got {type(env).__name__}.")
    else:
        env = _call("--env", wanted.env, GymEnv, wanted.env, num_envs=wanted.num_envs, **options)
    make = _find("--policy", wanted.policy)
    policy = _call("--policy", wanted.policy, make, *([env] if _takes_env(make) else []))
    if not callable(policy):
        raise ArgumentError(f"--policy {wanted.policy} must make a policy, got {type(policy).__name__}.")
    return policy, env


def _find(option: str, name: str) -> Callable[..., Any]:
    """Return what ``module:function`` stands for; the module is looked for in the working directory too."""
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ArgumentError(f"{option} takes module:function, got {name!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ArgumentError(f"{option} {name} can't be imported: {error}") from error
    if not callable(found):
        raise ArgumentError(f"{option} {name} must be a function, got {type(found).__name__}.")
    return found


def _takes_env(make: Callable[..., Any]) -> bool:
    needed = [
        parameter
        for parameter in inspect.signature(make).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return bool(needed) and (needed[0].default is inspect.Parameter.empty or needed[0].name == "env")


def _call(option: str, name: str, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return make(*arguments, **options)
    except (RecurlError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{option} {name} can't be made: {type(error).__name__}: {error}") from error
