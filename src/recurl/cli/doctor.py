"""``recurl doctor``: backends available on this machine, and checks of a recurrent policy's wiring."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import tyro

from recurl.cli.arguments import ReadsRun, parse_arguments
from recurl.cli.notices import notify
from recurl.core.errors import ArgumentError, RecurlError
from recurl.core.importing import load_object
from recurl.core.ranges import Count, flag
from recurl.diagnostics import CheckResult, check_wiring, machine_report
from recurl.envs import EnvBase, GymEnv
from recurl.trainers import RunFolder, load_agent, make_env
from recurl.trainers.env_name import is_jax, is_multi_agent
from recurl.trainers.keyword_arguments import keyword_arguments

_ROWS = 4
_Flag: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class Doctor(ReadsRun):
    """Report what is available on this machine, or check experimentally that a policy's memory works.

    Without arguments: available backends, reasons why others are unavailable, precision, and versions. With a policy
    and an environment, or a run: checks of the wiring; exit code 1 if one fails.
    """

    run: Annotated[Path | None, tyro.conf.Positional] = None
    """Run folder whose policy and environment are checked."""
    env: str | None = None
    """Gymnasium id, jax:..., vmas/... or pettingzoo/... as in recurl train, or module:function that returns a recurl
    environment."""
    num_envs: Count | None = None
    """Rows of the environment --env; by default a single one without batch dimension."""
    env_kwargs: tuple[str, ...] = ()
    """Arguments of the environment --env as name=value, such as k=8."""
    drop_observations: tuple[str, ...] = ()
    """Observations to drop from a Gymnasium id; the parts of a nested name are joined by dots."""
    policy: str | None = None
    """Function that returns the policy, as module:function; called without arguments, or with the environment."""
    steps: Count = 64
    """Number of steps to collect per row."""
    auto_register_policy_transforms: _Flag = False
    """Append missing trackers and primers, as a collector does (the default unless --env is module:function)."""
    no_auto_register_policy_transforms: _Flag = False
    """Check the wiring of the environment as it is (the default for module:function)."""

    @property
    def registers(self) -> bool:
        """Whether to append missing transforms."""
        if self.auto_register_policy_transforms and self.no_auto_register_policy_transforms:
            raise ArgumentError(
                "Use --auto-register-policy-transforms or --no-auto-register-policy-transforms, not both."
            )
        named = ":" in (self.env or "") and not (is_jax(self.env) or is_multi_agent(self.env))
        return self.auto_register_policy_transforms or not (named or self.no_auto_register_policy_transforms)


def read(arguments: list[str]) -> Doctor:
    """Parse the arguments."""
    return parse_arguments(Doctor, arguments, prog="recurl doctor")


def run(args: Doctor) -> int:
    """Print the report of the machine, or check a policy's wiring."""
    if args.run is None and args.env is None and args.policy is None:
        print(machine_report())
        return 0
    if (args.run is None) == (args.env is None) or (args.env is None) != (args.policy is None):
        raise ArgumentError("Name a run, or both --env and --policy (see recurl doctor --help).")
    given = [name for name in ("num_envs", "env_kwargs", "drop_observations") if getattr(args, name)]
    if args.run is not None and given:
        raise ArgumentError(
            f"{', '.join(map(flag, given))} can't be given with a run, whose own environment is checked: leave "
            f"{'it' if len(given) == 1 else 'them'} out, or name --env and --policy instead."
        )
    registers = args.registers
    policy, env = _from_run(args.run, trust=args.trust_run) if args.run is not None else _from_names(args)
    with env:
        results = check_wiring(policy, env, args.steps, auto_register_policy_transforms=registers)
    print("\n".join(map(str, results)))
    print(_verdict(results))
    return 0 if all(result.passed for result in results) else 1


def _verdict(results: list[CheckResult]) -> str:
    failed = [result.name for result in results if not result.passed]
    if failed:
        return f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}; start with the first"
    return f"all {len(results)} checks passed" if len(results) > 1 else "passed"


def _from_run(folder: Path, *, trust: bool) -> tuple[Any, EnvBase]:
    config, agent = load_agent(RunFolder(folder, notify, trust=trust))
    return agent.policy, make_env(config, min(config.num_envs, _ROWS), policy=agent.policy)


def _from_names(args: Doctor) -> tuple[Any, EnvBase]:
    named, made_by = args.env or "", args.policy or ""
    options = keyword_arguments("--env-kwargs", args.env_kwargs)
    if is_jax(named):
        from recurl.envs.jax_named import named_jax_env  # noqa: PLC0415 - imported where it is used

        options |= {"drop_observations": args.drop_observations}
        env = _call("--env", named, named_jax_env, named, args.num_envs or 1, **options)
    elif is_multi_agent(named):
        from recurl.envs.multi_agent_named import named_multi_agent_env  # noqa: PLC0415 - as above

        env = _call("--env", named, named_multi_agent_env, named, args.num_envs or 1, **options)
    elif ":" in named:
        rows = {} if args.num_envs is None else {"num_envs": args.num_envs}
        env = _call("--env", named, _find("--env", named), **rows, **options)
        if not isinstance(env, EnvBase):
            raise ArgumentError(f"--env {named} must return a recurl environment, got {type(env).__name__}.")
    else:
        options |= {"num_envs": args.num_envs, "drop_observations": args.drop_observations}
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
        raise ArgumentError(f"{option} {name} can't be created: {type(error).__name__}: {error}") from error
