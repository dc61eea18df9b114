"""What is to be kept is written before SIGTERM ends a process, which it does end."""

import signal
import subprocess
import sys

import pytest

from sirtaki.analysis import termination

PROGRAM = """
import os, runpy, signal, sys
Termination = runpy.run_path(sys.argv[2])["Termination"]  # without what the package loads

def keep():
    with termination.put_off():
        if sys.argv[1] == "while it is written":
            os.kill(os.getpid(), signal.SIGTERM)
        print("kept", flush=True)

termination = Termination(keep)
if sys.argv[1] == "with a handler of the script's":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
termination.watch()
if sys.argv[1] in ("while it is written", "after it was written"):
    keep()
os.kill(os.getpid(), signal.SIGTERM)
print("lives", flush=True)
"""


@pytest.mark.parametrize(
    ("when", "printed", "exit_code"),
    [
        ("before it is written", "kept", -signal.SIGTERM),
        ("while it is written", "kept", -signal.SIGTERM),
        ("after it was written", "kept", -signal.SIGTERM),
        ("with a handler of the script's", "", 7),
    ],
)
def test_it_is_kept_and_the_process_ends(when: str, printed: str, exit_code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, when, termination.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == exit_code, done.stderr
    assert done.stdout.strip() == printed
