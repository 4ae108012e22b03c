"""Commands whose output is closed, full, or no longer read."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

FULL = "recurl: The output can't be written: No space left on device.\n"


@pytest.mark.parametrize(
    ("command", "redirection", "code", "said"),
    [
        ("--help", ">&-", 0, ""),
        ("--help", ">/dev/full", 2, FULL),
        ("--help", "| true", 141, ""),
        ("--version", ">/dev/full", 2, FULL),
        ("--version", "| true", 141, ""),
        pytest.param("compare --help", ">&-", 0, "", marks=pytest.mark.full),  # imports torch, which takes seconds
        ("compare --help", ">/dev/full", 2, "recurl: [Errno 28] No space left on device\n"),
        pytest.param("compare --help", "| true", 141, "", marks=pytest.mark.full),
        ("nonsense", ">&- 2>&-", 2, ""),
        ("nonsense", "2>/dev/full", 2, ""),
        ("nonsense", "2>&1 | true", 141, ""),
    ],
)
def test_no_traceback(command, redirection, code, said):
    script = f"{sys.executable} -m recurl {command} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def test_a_closed_stream_gives_its_descriptor_to_no_file():
    """Otherwise a file opened later would receive what a library writes to the stream."""
    program = "import os; from recurl.cli.output import with_output; "
    program += "with_output(lambda: os.write(2, str(os.open('/dev/null', os.O_RDONLY)).encode()))"
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "{program}" >&-'], capture_output=True, check=False)
    assert int(done.stderr) > 2
