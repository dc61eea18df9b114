"""Models compiled around Sirtaki train like one process, and nothing of Sirtaki is compiled."""

import subprocess
import sys

import pytest
from rank_jobs import OVER_MESH, Job, played_on_ranks, slow

ENV = OVER_MESH  # tuned and remembered: search techniques are called where a step is compiled

test_compiled_steps_train_as_in_one_process = played_on_ranks("compiled", Job(2, env=ENV))

test_compiled_parts_of_steps_train_as_in_one_process = played_on_ranks("compiled", slow(Job(2, env=ENV)), cases="MORE")


@pytest.mark.lengthy
def test_marking_functions_loads_no_compiler() -> None:
    script = (
        "import sys, sirtaki.torch as hvd; hvd.init(); assert hvd.allreduce._torchdynamo_disable; "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
