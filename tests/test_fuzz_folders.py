"""Hostile folders: a small part of what benchmarks/fuzz_folders.py makes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = """
import json, sys, tempfile
from dataclasses import asdict
from pathlib import Path
import torch
from fuzz_folders import Place, fuzz
torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as name:
    done = fuzz(Place(Path(name)), 80, 3, lambda text: print(text, file=sys.stderr))
print(json.dumps([asdict(case) for case in done]))
"""


@pytest.mark.slow
def test_no_folder_runs_code_writes_outside_hangs_or_ends_in_a_traceback():
    path = os.pathsep.join([str(BENCHMARKS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    cases = json.loads(done.stdout.splitlines()[-1])
    bad = [case for case in cases if case["outcome"] not in ("ok", "refused")]
    assert not bad
    outcomes = Counter(case["outcome"] for case in cases)
    assert outcomes["ok"] > 15
    assert outcomes["refused"] > 15
