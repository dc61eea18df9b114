"""Elastic jobs with random faults in every phase keep their commits and end as specified."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torment import elastic_chaos

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_jobs_that_are_hit_at_random_lose_repeat_and_leave_nothing() -> None:
    """Apply SIRTAKI_TEST_KILLS faults."""
    strikes = os.environ.get("SIRTAKI_TEST_KILLS", "40")
    command = [sys.executable, elastic_chaos.__file__, "0", strikes]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-2000:]
