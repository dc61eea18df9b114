"""A rank that mpiexec ends says what it did; the processes that it has forked do not."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, signal, sys, time, types
from sirtaki.run.rank_channel import answer_termination
sys.modules["sirtaki.engine.process_end"] = types.SimpleNamespace(describe=lambda: "waits for rank 1")
answer_termination(lambda doing: print("it", doing, flush=True))
if sys.argv[1] == "itself":
    os.kill(os.getpid(), signal.SIGTERM)
up, ready = os.pipe()
if (child := os.fork()) == 0:
    os.write(ready, b".")
    time.sleep(60)
else:
    os.read(up, 1)
    os.kill(child, signal.SIGTERM)
    sys.exit(-os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(
    ("whom", "says", "returncode"),
    [("itself", "it waits for rank 1\n", -signal.SIGTERM), ("its child", "", signal.SIGTERM)],
)
def test_a_rank_says_what_it_did_before_sigterm_ends_it_and_its_children_say_nothing(whom, says, returncode):
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, whom]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.returncode, done.stderr) == (says, returncode, "")
