"""Jobs of real ranks under mpiexec."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sirtaki.engine.mpi_library import find_mpi_library, find_mpiexec
from sirtaki.errors import LaunchError
from sirtaki.run.__main__ import main
from sirtaki.run.function import run
from sirtaki.run.leftovers import mapped_segments

LIMIT_S = 120.0


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))


def _has_mpi():
    try:
        find_mpiexec(find_mpi_library(sys.executable))
    except LaunchError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_mpi(), reason="mpi4py has no MPI library with an mpiexec here")


SCRIPT = """
import os, signal, sys, time
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
fault = sys.argv[1]
print("up", rank, MPI.COMM_WORLD.Get_size(), os.environ["HOROVOD_RANK"], os.environ["OMP_NUM_THREADS"], flush=True)
if rank == 1:
    match fault:
        case "raise":
            raise ValueError("a bad batch")
        case "exit":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
if fault != "none":
    time.sleep(60)
"""


@pytest.fixture
def environ(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "SIRTAKI_", "HOROVOD_"))}
    return {**kept, "PYTHONPATH": ROOT, "XDG_CACHE_HOME": str(tmp_path), "LAUNCH_TEST": str(tmp_path)}


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


@pytest.fixture
def launch(environ, tmp_path):
    def start(*words):
        return subprocess.run(
            [sys.executable, "-m", "sirtaki.run", *map(str, words)],
            env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip

    return start


@contextlib.contextmanager
def hanging(environ, script):
    """Start a launcher of two ranks that do not end by themselves."""
    job = subprocess.Popen(
        [sys.executable, "-m", "sirtaki.run", "-np", "2", "python", str(script), "hang"],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with job:
        for _ in range(2):
            assert "up" in job.stdout.readline()
        yield job


def left_behind(environ):
    """Return the processes that have this test's mark in their environment."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if f"LAUNCH_TEST={environ['LAUNCH_TEST']}".encode() in file.read().split(b"\0"):
                found.append(pid)
    return found


def test_ranks_run_with_marked_output_their_place_and_files(launch, script, tmp_path):
    job = launch("-np", 2, "--verbose", "--output-filename", tmp_path / "out", "python", script, "none")
    assert job.returncode == 0
    assert sorted(re.sub(r" \d+$", "", line) for line in job.stdout.splitlines()) == ["[0] up 0 2 0", "[1] up 1 2 1"]
    assert "MPI library: " in job.stderr
    assert "starts: " in job.stderr
    assert "\x1e" not in job.stdout + job.stderr
    assert (tmp_path / "out" / "rank.1" / "stdout").read_text().startswith("up 1 2 1")


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("raise", 1, "ValueError: a bad batch"),
        pytest.param("exit", 3, "exit code 3", marks=pytest.mark.integration),
        ("kill", 137, "killed by SIGKILL.*"),
    ],
)
def test_one_rank_that_fails_ends_all_with_its_exit_code(launch, script, environ, fault, code, says):
    began = time.monotonic()
    job = launch("-np", 2, "python", script, fault)
    assert job.returncode == code
    lines = [line for line in job.stderr.splitlines() if not line.startswith("[1]")]
    assert re.fullmatch(rf"sirtakirun: rank 1 on \S+ failed \({says}\); ending all ranks", "\n".join(lines))
    assert left_behind(environ) == []
    assert time.monotonic() - began < 30
    if fault == "raise":  # the traceback begins in the user's script
        lines = job.stderr.splitlines()
        assert str(script) in lines[lines.index("[1] Traceback (most recent call last):") + 1]


def test_an_error_that_all_ranks_raise_is_shown_once_with_its_remedy(launch, tmp_path):
    (tmp_path / "script.py").write_text("import horovod.torch\n")
    job = launch("-np", 2, "python", tmp_path / "script.py")
    assert job.stderr.count("Traceback") == 1
    assert "No module named 'horovod'; with --as-horovod `import horovod` imports Sirtaki" in job.stderr


def test_an_invalid_setting_is_reported_with_the_line_of_the_script_and_without_a_traceback(launch, tmp_path):
    (script := tmp_path / "script.py").write_text(
        "from sirtaki.engine.settings import Settings\nSettings.from_environ({'SIRTAKI_STREAMS': 'many'})\n"
    )
    job = launch("-np", 2, "python", script)
    assert "Traceback" not in job.stderr
    lines = [line for line in job.stderr.splitlines() if "the same error" not in line]
    assert [line[4:] for line in lines[:2]] == [
        "sirtaki.errors.ConfigError: the setting SIRTAKI_STREAMS='many' is invalid; accepted values: a whole number "
        "from 1",
        f"raised by line 2 of {script}",
    ]
    assert re.fullmatch(r"sirtakirun: rank . on \S+ failed \(ConfigError: .*\); ending all ranks", lines[2])


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.integration)]
)
def test_a_signal_to_the_launcher_ends_all_ranks(environ, script, number, code):
    with hanging(environ, script) as job:
        job.send_signal(number)
        assert job.wait(timeout=LIMIT_S) == code
    assert left_behind(environ) == []


def test_other_programs_run_too_and_give_their_exit_code(launch):
    job = launch("-np", 1, "sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE; exit 4")
    assert job.stdout == "0 of 1\n"
    assert job.returncode == 4


def test_variables_reach_the_ranks_and_an_option_has_priority_over_the_environment(launch, environ):
    environ["SIRTAKI_STREAMS"] = "2"
    show = "import os; print(os.environ['A'], os.environ['SIRTAKI_STREAMS'], os.environ['OMP_NUM_THREADS'])"
    job = launch("-np", 1, "-x", "A=b c", "-x", "OMP_NUM_THREADS=7", "--num-nccl-streams", 3, "python", "-c", show)
    assert job.stdout == "b c 3 7\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-np", 2, "python", "nothere.py"], "the script 'nothere.py' was not found"),
        (["-np", 2, "--hostfile", "nothere", "python", "-V"], "hostfile nothere cannot be read"),
        (["-np", 3, "-H", "localhost:2", "python", "-V"], "requires more ranks than the hosts have slots (2)"),
        (["python", "-V"], "the number of ranks is missing"),
        (
            ["-np", 1, "-x", "NOT_SET", "python", "-V"],
            "the option -x NOT_SET exports an environment variable that is not set",
        ),
        (["-np", 1, "--num-nccl-streams", "some", "python", "-V"], "SIRTAKI_STREAMS='some' is invalid"),
        (
            ["-np", 1, "--config-file", "nothere", "python", "-V"],
            "the file nothere given with --config-file cannot be read",
        ),
    ],
)
def test_implausible_options_are_rejected_before_anything_starts(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    assert main(list(map(str, words))) == 2
    assert says in capsys.readouterr().err


@pytest.mark.integration
def test_horovods_modules_are_sirtakis_and_have_priority_over_other_horovods(launch, tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise SystemExit('the other horovod')")
    (tmp_path / "script.py").write_text(
        "import subprocess, sys\n"
        "import horovod, horovod.runner, horovod.torch as hvd, horovod.torch.mpi_ops\n"
        "import sirtaki.torch, sirtaki.torch.mpi_ops\n"
        "from horovod.torch.mpi_ops import allreduce\n"
        "assert hvd is sirtaki.torch and hvd.__spec__.name == 'sirtaki.torch'\n"
        "assert horovod.torch.mpi_ops is sirtaki.torch.mpi_ops\n"
        "assert horovod.run.__module__ == 'sirtaki.run.function'\n"
        "try:\n    import horovod.tensorflow\nexcept ImportError as err:\n    print(err)\n"
        "child = 'import sys; sys.path.remove(\"\"); import horovod; print(horovod.__version__)'\n"
        "subprocess.run([sys.executable, '-c', child], check=True)\n"
    )
    job = launch("-np", 1, "--as-horovod", "python", tmp_path / "script.py")
    assert job.returncode == 0, job.stderr
    assert "the import of horovod.tensorflow failed, because Sirtaki replaces Horovod" in job.stdout
    assert job.stdout.endswith("0.28.1\n")
    assert "`import horovod` imports Sirtaki" in job.stderr


@pytest.mark.lengthy
def test_a_function_runs_on_every_rank_and_its_results_are_returned_by_rank(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    assert run(divmod, (17, 5), num_proc=2) == [(3, 2), (3, 2)]


@pytest.mark.lengthy
def test_a_function_that_raises_is_an_error(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    with pytest.raises(LaunchError, match="exit code 1"):
        run(divmod, (1, 0), np=1)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_script_sees_the_same_environment_as_under_the_interpreter(launch, tmp_path):
    folder = tmp_path / "mine and größer"
    folder.mkdir()
    (folder / "script é.py").write_text("import sys; print([__file__, *sys.argv, sys.path[0]])")
    relative = os.path.join(folder.name, "script é.py")
    job = launch("-np", 1, "python", relative, "a b", ":", "", "*", "$HOME")
    assert eval(job.stdout) == [str(folder / "script é.py"), relative, "a b", ":", "", "*", "$HOME", str(folder)]


@pytest.mark.parametrize("options", [(), ("--min-np", 2)])
def test_only_the_script_sees_modules_of_its_folder(environ, tmp_path, options):
    (tmp_path / "sirtaki").mkdir()  # as in the folder above a checkout
    for name in ("argparse", "msgspec", "selectors", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the folder of the script was searched')")
    (tmp_path / "beside.py").write_text("found = 'beside'")
    (tmp_path / "script.py").write_text("import beside, sys; print(beside.found, sys.flags.safe_path, sys.path[0])")
    job = subprocess.run(
        [sys.executable, "-P", "-m", "sirtaki.run", "-np", "2", *map(str, options), "python", "script.py"],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert re.sub(r"\[\S+\] ", "", job.stdout) == 2 * f"beside False {tmp_path}\n"


OF_OTHERS = re.compile(
    r"(OMPI|OPAL|PMIX|PRTE|PMI|HYDRA|HYDI|MPI|MPIR)_.*|LD_LIBRARY_PATH|TORCHINDUCTOR_CACHE_DIR|OLDPWD|PWD|SHLVL|_"
)
"""Variables that mpiexec, PyTorch and shells set."""


@pytest.mark.parametrize("options", [(), ("--min-np", 2)])
def test_every_variable_that_differs_in_a_rank_is_in_the_reference(environ, launch, tmp_path, options):
    (tmp_path / "script.py").write_text(
        "import json, os, sirtaki.torch as hvd\n"
        "before = dict(os.environ)\n"
        "hvd.init()\n"
        "print(json.dumps([hvd.rank(), before, dict(os.environ)]))\n"
    )
    job = launch("-np", 2, *options, "--no-prefix", "python", "script.py")
    assert job.returncode == 0, job.stderr
    _, told = (Path(ROOT) / "docs/reference/settings.md").read_text().split("## Variables that Sirtaki sets")
    listed = set(re.findall(r"`([A-Z_]+)`", told.split("\n## ")[0]))
    for _, before, after in map(json.loads, job.stdout.splitlines()):
        changed = {name for name in {*environ, *after} if environ.get(name) != after.get(name)}
        assert {name for name in changed if not OF_OTHERS.fullmatch(name)} <= listed
        if options:
            assert before["HOROVOD_HOSTNAME"] == after["HOROVOD_HOSTNAME"] == "localhost"


def test_a_search_path_without_the_scripts_folder_stays_without(launch, tmp_path):
    (tmp_path / "script.py").write_text(f"import sys; print({str(tmp_path)!r} in sys.path, '' in sys.path)")
    for command in (("-P", "script.py"), ("-P", "-c", "import sys; print(sys.path[0] == '', '' in sys.path)")):
        assert launch("-np", 1, "python", *command).stdout == "False False\n"


@pytest.mark.lengthy
def test_a_progress_bar_is_shown_while_it_moves(environ, tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys, time\n"
        "sys.stderr.write('\\rstep 1'); sys.stderr.flush()\n"
        "while not os.path.exists('seen'):\n    time.sleep(0.01)\n"
        "sys.stderr.write('\\rstep 2\\n')\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "sirtaki.run", "-np", "1", "python", "script.py"],
        env=environ, cwd=tmp_path, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    with job:
        assert job.stderr.read(7) == b"\rstep 1"
        (tmp_path / "seen").touch()
        assert job.stderr.read(8) == b"\rstep 2\n"
        assert job.wait(timeout=LIMIT_S) == 0


@pytest.mark.integration
def test_an_output_that_cannot_be_written_does_not_end_the_job(environ, tmp_path):
    show = "import pathlib, sys; print('größe ✓'); pathlib.Path('done').write_text('✓', encoding='utf-8')"
    (tmp_path / "script.py").write_text(show, encoding="utf-8")
    command = f"{sys.executable} -m sirtaki.run -np 1 python script.py"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for where, more in ((">/dev/full", {}), (">/dev/full 2>&1", {}), (">&- 2>&-", {}), ("| cat >out", ascii_only)):
        job = subprocess.run(
            ["bash", "-c", f"{command} {where}"], env={**environ, **more}, cwd=tmp_path, timeout=LIMIT_S
        )
        assert job.returncode == 0
        (tmp_path / "done").unlink()
    assert (tmp_path / "out").read_text() == "gr\\xf6\\xdfe \\u2713\n"


def test_a_process_that_a_rank_forks_may_end_as_it_likes(launch, tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "for end in ('sys.exit(0)', 'sys.exit(4)', 'raise ValueError', 'os._exit(5)'):\n"
        "    if (child := os.fork()) == 0:\n"
        "        sys.stderr = open(os.devnull, 'w')\n"
        "        exec(end)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    # Python 3.12 warns of each fork beside threads.
    job = launch("-np", 1, "python", "-W", "ignore::DeprecationWarning", "script.py")
    assert (job.stdout, job.stderr, job.returncode) == ("0\n4\n1\n5\n", "", 0)


@pytest.mark.integration
def test_ranks_write_no_colours_into_a_file(launch, tmp_path):
    (tmp_path / "script.py").write_text("from rich.console import Console\nConsole().print('slow', style='bold red')\n")
    job = launch("-np", 2, "python", "script.py")
    assert sorted(job.stdout.splitlines()) == ["[0] slow", "[1] slow"], job.stderr


@pytest.mark.integration
def test_an_unchanged_ddp_script_runs(launch, tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()\n"
        "print(dist.get_rank(), dist.get_world_size(), model.module.weight.grad.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    job = launch("-np", 2, "python", "script.py")
    assert sorted(job.stdout.splitlines()) == ["[0] 0 2 [[0.5, 0.5]]", "[1] 1 2 [[0.5, 0.5]]"], job.stderr


@pytest.mark.lengthy
def test_a_killed_launcher_leaves_nothing_behind(environ, script):
    with hanging(environ, script) as job:
        segments = set().union(*(mapped_segments(pid) for pid in left_behind(environ)))
        job.kill()
    deadline = time.monotonic() + 20
    while (left_behind(environ) or any(segment.exists() for segment in segments)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(environ) == []
    assert [segment for segment in segments if segment.exists()] == []


@pytest.mark.integration
def test_files_of_a_killed_launchers_mpiexec_and_ranks_are_removed(environ, script):
    """The launcher, which would clean up, is killed with them."""
    earlier = set(Path(tempfile.gettempdir()).glob("ompi.*"))  # of other jobs, whose process ids may come again
    with hanging(environ, script) as job:
        own = left_behind(environ)
        segments = set().union(*(mapped_segments(pid) for pid in own))
        folders = {Path(tempfile.gettempdir()) / f"ompi.{pid}" for pid in own} - earlier
        assert any(path.exists() for path in [*segments, *folders])
        (janitor,) = [pid for pid in own if "leftovers" in Path(f"/proc/{pid}/cmdline").read_text()]
        time.sleep(2.0)  # it looks now and then
        os.kill(int(janitor), signal.SIGSTOP)  # it has no time to look again
        for pid in {*own, str(job.pid)} - {janitor}:
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.5)
        os.kill(int(janitor), signal.SIGCONT)
    deadline = time.monotonic() + 20
    while any(path.exists() for path in [*segments, *folders]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [path for path in [*segments, *folders] if path.exists()] == []


@pytest.mark.integration
def test_files_of_killed_mpiexecs_do_not_block_a_job(environ, tmp_path):
    last = int(Path("/proc/sys/kernel/ns_last_pid").read_text())
    for pid in range(last, last + 2000):  # as in a container that is started again, where the same numbers come
        (tmp_path / f"ompi.{pid}").mkdir()
        (tmp_path / f"ompi.{pid}" / f"pmix.{socket.gethostname()}.tool").touch()
    job = subprocess.run(
        [sys.executable, "-m", "sirtaki.run", "-np", "1", "python", "-c", "print('up')"],
        env={**environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert (job.stdout, job.returncode) == ("up\n", 0), job.stderr
