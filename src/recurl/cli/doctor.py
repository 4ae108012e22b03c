"""``recurl doctor``: backends of this machine, and checks of a recurrent policy's wiring."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import tyro

from recurl.cli.arguments import ReadsRun, parse_arguments
from recurl.cli.notices import notify
from recurl.diagnostics import CheckResult, check_wiring, machine_report
from recurl.envs import EnvBase, GymEnv
from recurl.errors import ArgumentError, RecurlError
from recurl.importing import load_object
from recurl.ranges import Count
from recurl.trainers import RunFolder, load_agent, make_env
from recurl.trainers.keyword_arguments import keyword_arguments

_ROWS = 4
_Flag: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Doctor(ReadsRun):
    """Say what runs on this machine, or check by experiment that a policy's memory works.

    Without arguments: which backends run here, and why not, the precision, and versions. With a policy and an
    environment, or a run: checks of its wiring; exit code 1 when one fails.
    """

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Folder of a run, whose policy and environment are checked."""
    env: str | None = None
    """Gymnasium id, or module:function that makes an environment of recurl."""
    num_envs: Count | None = None
    """Rows of the environment; by default a single one without batch dimension."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment as name=value, such as k=8."""
    drop_observations: tuple[str, ...] = ()
    """Observations of a gymnasium id to leave out; the parts of a nested name are joined by dots."""
    policy: str | None = None
    """Function that makes the policy, as module:function; called without arguments, or with the environment."""
    steps: Count = 64
    """Steps of every row to collect."""
    auto_register_policy_transforms: _Flag = False
    """Append the tracker and the primers that are missing, as a collector does (the default for a gymnasium id)."""
    no_auto_register_policy_transforms: _Flag = False
    """Check the wiring of the environment as it is (the default for module:function)."""

    @property
    def registers(self) -> bool:
        """True if missing transforms are to be appended."""
        if self.auto_register_policy_transforms and self.no_auto_register_policy_transforms:
            raise ArgumentError("Give --auto-register-policy-transforms or --no-auto-register-policy-transforms.")
        named = ":" in (self.env or "")
        return self.auto_register_policy_transforms or not (named or self.no_auto_register_policy_transforms)


def read(arguments: list[str]) -> Doctor:
    """Parse the arguments."""
    return parse_arguments(Doctor, arguments, prog="recurl doctor")


def run(wanted: Doctor) -> int:
    """Print the machine's table, or check a policy's wiring."""
    if wanted.run is None and wanted.env is None and wanted.policy is None:
        print(machine_report())
        return 0
    if (wanted.run is None) == (wanted.env is None) or (wanted.env is None) != (wanted.policy is None):
        raise ArgumentError("Name a run, or both --env and --policy (see recurl doctor --help).")
    registers = wanted.registers
    policy, env = _from_run(wanted.run, trust=wanted.trust_run) if wanted.run is not None else _from_names(wanted)
    with env:
        results = check_wiring(policy, env, wanted.steps, auto_register_policy_transforms=registers)
    print("\n".join(map(str, results)))
    print(_verdict(results))
    return 0 if all(result.passed for result in results) else 1


def _verdict(results: list[CheckResult]) -> str:
    failed = [result.name for result in results if not result.passed]
    if failed:
        return f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}; begin with the first"
    return f"all {len(results)} checks passed" if len(results) > 1 else "passed"


def _from_run(folder: Path, *, trust: bool) -> tuple[Any, EnvBase]:
    config, agent = load_agent(RunFolder(folder, notify, trust=trust))
    return agent.policy, make_env(config, min(config.num_envs, _ROWS), policy=agent.policy)


def _from_names(wanted: Doctor) -> tuple[Any, EnvBase]:
    named, made_by = wanted.env or "", wanted.policy or ""
    options = keyword_arguments("--env-kwargs", wanted.env_kwargs)
    if ":" in named:
        rows = {} if wanted.num_envs is None else {"num_envs": wanted.num_envs}
        env = _call("--env", named, _find("--env", named), **rows, **options)
        if not isinstance(env, EnvBase):
            raise ArgumentError(f"--env {named} must return an environment of recurl, got {type(env).__name__}.")
    else:
        options |= {"num_envs": wanted.num_envs, "drop_observations": wanted.drop_observations}
        env = _call("--env", named, GymEnv, named, **options)
    make = _find("--policy", made_by)
    policy = _call("--policy", made_by, make, *([env] if _takes_env(make) else []))
    if not callable(policy):
        raise ArgumentError(f"--policy {made_by} must return a policy, got {type(policy).__name__}.")
    return policy, env


def _find(option: str, name: str) -> Callable[..., Any]:
    """Import ``module:function``."""
    found = load_object(option, name, "function")
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
