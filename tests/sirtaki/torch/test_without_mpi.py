"""Jobs that no MPI has started, as a user starts them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH, UNTUNED, environment

ENV = {**UNTUNED, **OVER_MESH}
TRAIN = """
    import os, signal, sys, time
    import torch
    import sirtaki.torch as hvd

    hvd.init()
    for step in range(int(sys.argv[1])):
        hvd.allreduce(torch.ones(3), name="x")
        if step == 20 and hvd.rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 20 and hvd.rank() == 0:
            print("under way", flush=True)
        time.sleep(0.01)
    print("finished", hvd.rank(), flush=True)
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_needs_no_mpi(run_ranks: RunRanks, ranks: int) -> None:
    assert run_ranks("without_mpi.py", ranks, env=ENV).stdout.count("trained") == ranks


@pytest.mark.lengthy
def test_a_single_rank_loads_neither_mpi_nor_modules_for_tuning(tmp_path: Path) -> None:
    code = (
        "import sys, sirtaki.torch as hvd; loaded = {'networkx', 'sqlalchemy'} & {*sys.modules}; "
        "hvd.init(); print(hvd.size(), loaded | {'mpi4py.MPI'} & {*sys.modules})"
    )
    environ = {
        name: value for name, value in environment(tmp_path, UNTUNED).items() if not name.startswith("OMPI_COMM")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["1", "set()"]


@pytest.mark.parametrize(("registry", "loaded"), [("on", 1), ("off", 0)])
def test_rank_0_of_a_job_without_an_entry_loads_modules_for_the_search_in_the_registry(
    run_ranks: RunRanks, tmp_path: Path, registry: str, loaded: int
) -> None:
    registry = str(tmp_path / "registry.db") if registry == "on" else "off"
    env = {**OVER_MESH, "SIRTAKI_WARMUP_ITERATIONS": "100", "SIRTAKI_REGISTRY": registry}
    assert run_ranks("loads_ahead.py", 2, env=env).stdout.count("loads ahead") == loaded


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("kill", 137, ["ends the job, because rank 1 has ended", "it is in iteration 10"]),
        pytest.param(
            "raise", 1, ["ValueError: a bad batch", "because rank 1 raised ValueError"], marks=pytest.mark.slow
        ),
        pytest.param("exit", 3, ["because rank 1 has ended with exit code 3"], marks=pytest.mark.slow),
        pytest.param("leave", 1, ["rank 1 has ended its script"], marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_the_job_and_is_named_by_all(
    run_ranks: RunRanks, fault: str, code: int, says: list[str]
) -> None:
    job = run_ranks("faults.py", 3, fault, env={**ENV, "SIRTAKI_TUNE": "0"}, check=False, timeout_s=60)
    assert job.returncode == code, job.stderr
    for text in says:
        assert text in job.stderr
    assert job.stderr.count("Traceback") <= (fault in ("raise", "leave")) * 2
    assert "done" not in job.stdout


def torchrun(
    tmp_path: Path, ranks: int, *arguments: object, options: tuple[str, ...] = (), under: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    command = ["--standalone", "--nproc-per-node", str(ranks), *options, str(script), *map(str, arguments)]
    return subprocess.Popen(
        [*under, sys.executable, "-m", "torch.distributed.run", *command],
        env=environment(tmp_path, UNTUNED),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


FULL_SHM = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=64k tmpfs /dev/shm && ! cat /dev/zero > /dev/shm/full 2> /dev/null && exec "$@"',
    "sh",
)
"""Command that runs another one with a full /dev/shm."""


@pytest.mark.integration
def test_a_job_trains_with_a_full_dev_shm(tmp_path: Path) -> None:
    try:
        subprocess.run([*FULL_SHM, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as err:
        pytest.skip(f"this process may not mount a file system of its own: {err}")
    out, err = torchrun(tmp_path, 2, 5, 0, under=FULL_SHM).communicate(timeout=100)
    assert sorted(out.split("\n")[:-1]) == ["finished 0", "finished 1"], err
    assert "Traceback" not in err


@pytest.mark.slow
def test_torchrun_starts_ranks_and_starts_them_again(tmp_path: Path) -> None:
    out, err = torchrun(tmp_path, 3, 60, 0, options=("--max-restarts", "1")).communicate(timeout=100)
    assert sorted(out.split("\n")[:-1])[:3] == ["finished 0", "finished 1", "finished 2"], err


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "interrupt"])
def test_torchrun_names_the_failed_rank_and_no_process_remains(tmp_path: Path, fault: str) -> None:
    job = torchrun(tmp_path, 3, 5000, 0 if fault == "kill" else -1)
    assert job.stdout is not None
    job.stdout.readline()
    begin_s = time.monotonic()
    if fault == "interrupt":
        os.kill(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert time.monotonic() - begin_s < 20.0
    assert job.returncode != 0
    if fault == "kill":
        assert "Signal 9 (SIGKILL)" in err
        assert "rank 1 has ended: its connection is closed" in err
    with pytest.raises(ProcessLookupError):  # the whole session is gone
        os.killpg(job.pid, 0)
