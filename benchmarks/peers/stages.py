"""Sampling profiler that attributes the CPU time of a training run to stages.

A timer interrupts the process half a millisecond of wall time after the previous sample. The CPU time used since then
is attributed to the stage of the interrupted code. The paths of the files on the stack determine the stage, so that
nothing is patched and functions can move within a package. The time of the sampler itself is excluded.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from types import CodeType, FrameType
from typing import NamedTuple

INTERVAL = 0.0005
"""Seconds between samples."""


class _Rule(NamedTuple):
    """Frames whose path contains ``path`` belong to ``stage``."""

    path: str
    stage: str
    within: tuple[str, ...] = ()
    """Apply only within these stages (of an outer frame); empty: everywhere."""
    last: bool = False
    """Attribute everything called from these frames to the stage too."""


COLLECTION, POLICY, FORWARD, LOSS, ADVANTAGE = "collection rest", "policy step", "forward", "loss", "advantage"
STAGES = (
    *("env physics", "env interface", "transforms", POLICY, COLLECTION),
    *("boundaries", ADVANTAGE, "minibatches", FORWARD, LOSS, "backward", "optimizer", "update rest", "logging", "rest"),
)
"""All stages, in the order of a training step."""
_RULES = (
    _Rule("/torch/autograd/__init__", "backward", last=True),
    _Rule("/torch/autograd/graph", "backward", last=True),
    _Rule("/torch/optim/", "optimizer", last=True),
    _Rule("/torch/nn/utils/clip_grad", "optimizer", last=True),
    _Rule("/recurl/sequences/boundaries", "boundaries", last=True),
    _Rule("/recurl/native/memory", COLLECTION),
    _Rule("/recurl/recurrence/", POLICY, (COLLECTION, POLICY)),
    _Rule("/recurl/recurrence/", FORWARD, (LOSS,)),
    _Rule("/recurl/envs/rollout", COLLECTION),
    _Rule("/recurl/envs/tasks/", "env physics"),
    _Rule("/gymnasium/", "env physics"),
    _Rule("/recurl/envs/", "env interface"),
    _Rule("/recurl/transforms/", "transforms"),
    _Rule("/recurl/collectors/", COLLECTION),
    _Rule("/recurl/data/", "minibatches"),
    _Rule("/recurl/objectives/value/", ADVANTAGE),
    _Rule("/recurl/objectives/sequences", ADVANTAGE),
    _Rule("/recurl/objectives/", LOSS, ("update rest", "rest", FORWARD, LOSS)),
    _Rule("/recurl/modules/distributions", LOSS, (FORWARD, LOSS)),
    _Rule("/recurl/modules/", POLICY, (COLLECTION,)),
    _Rule("/tensordict/nn/", POLICY, (COLLECTION,)),
    _Rule("/recurl/modules/", FORWARD, (LOSS,)),
    _Rule("/recurl/trainers/networks/", POLICY, (COLLECTION,)),
    _Rule("/recurl/trainers/networks/", FORWARD, (LOSS,)),
    _Rule("/torch/nn/modules/linear", POLICY, (COLLECTION,)),
    _Rule("/torch/nn/modules/linear", FORWARD, (LOSS,)),
    _Rule("/recurl/trainers/optim/", "optimizer"),
    _Rule("/tensordict/nn/", FORWARD, (LOSS,)),
    _Rule("/recurl/trainers/algorithms/ppo", "update rest"),
    _Rule("/recurl/trainers/algorithms/dqn", "update rest"),
    *(
        _Rule(f"/recurl/{name}", "logging", last=True)
        for name in (
            "trainers/report/",
            "trainers/run/episodes",
            "trainers/run/folder",
            "trainers/files/",
            "core/seeding",
        )
    ),
)


class StageSampler:
    """Samples the stack of the main thread between :meth:`start` and :meth:`stop`.

    Attributes:
        seconds: CPU seconds per stage.
        lines: CPU seconds per stage and innermost function, ``(stage, "file:function")``.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.lines: Counter[tuple[str, str]] = Counter()
        self._rules: dict[CodeType, list[_Rule]] = {}
        self._last = 0.0

    def start(self) -> None:
        """Start sampling; replaces the handler of SIGALRM."""
        self._previous = signal.signal(signal.SIGALRM, self._sample)
        self._last = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, INTERVAL)

    def stop(self) -> None:
        """Stop sampling and restore the handler of SIGALRM."""
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a pending sample would set the timer again
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._previous)

    def _sample(self, _: int, frame: FrameType | None) -> None:
        now = time.process_time()
        codes: list[CodeType] = []
        innermost = frame
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        stage = self._stage(codes)
        self.seconds[stage] += now - self._last
        if innermost is not None:
            code = innermost.f_code
            where = "/".join(code.co_filename.rsplit("/", 2)[-2:])
            self.lines[stage, f"{where}:{code.co_qualname}:{innermost.f_lineno}"] += now - self._last
        signal.setitimer(signal.ITIMER_REAL, INTERVAL)
        self._last = time.process_time()

    def _stage(self, codes: list[CodeType]) -> str:
        """Return the stage of a stack, given with the innermost frame first."""
        stage = "rest"
        for code in reversed(codes):
            for rule in self._rules_of(code):
                if not rule.within or stage in rule.within:
                    if rule.last:
                        return rule.stage
                    # Everything that an advantage estimator calls counts as its cost, the critic's pass included.
                    stage = stage if stage == ADVANTAGE else rule.stage
                    break
        return stage

    def _rules_of(self, code: CodeType) -> list[_Rule]:
        found = self._rules.get(code)
        if found is None:
            found = self._rules[code] = [rule for rule in _RULES if rule.path in code.co_filename]
        return found
