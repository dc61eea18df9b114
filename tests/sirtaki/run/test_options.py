"""Options, on the command line and in files, and the commands that they become."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sirtaki.torch
import sirtaki.torch.elastic
import sirtaki.torch.process_sets
from sirtaki.engine.mpi_library import MpiLibrary
from sirtaki.engine.settings import VARIABLES, WITHOUT_EFFECT, Settings
from sirtaki.errors import ConfigError
from sirtaki.run.as_horovod import SHIM, HorovodFinder, install
from sirtaki.run.hosts import Host
from sirtaki.run.launch import RUN_RANK, LaunchSpec, mpiexec_command, rank_command, ssh_variables, ssh_words, unescape
from sirtaki.run.options import RANK_SETTINGS, arguments_from_file, build_parser, option_names, parse

# ── options ───────────────────────────────────────────────────────────────────────────────────────────────────────────


# All options of horovodrun 0.28.1.
HOROVODRUN = """
-v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces --network-interface
--output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb --cycle-time-ms
--cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --autotune-log-file
--autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
--autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout
--reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-stall-check
--stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --mpi-threads-disable --mpi-args --tcp
--binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --log-without-timestamp
-prefix-timestamp --prefix-output-with-timestamp -H --hosts -hostfile --hostfile --host-discovery-script --gloo --mpi
--jsrun -h --help
"""


def test_every_option_of_horovodrun_is_accepted():
    known = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert set(re.findall(r"-\S+", HOROVODRUN)) <= known


def test_arguments_after_the_script_belong_to_the_script():
    options = parse(["-np", "2", "python", "train.py", "-np", "7", "--verbose", "--lr", "1"])
    assert options.ranks == 2
    assert not options.verbose
    assert options.command == ["python", "train.py", "-np", "7", "--verbose", "--lr", "1"]
    assert parse(["-np", "2", "--", "python", "x.py"]).command == ["python", "x.py"]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--fusion-threshold-mb", "32"], "unit_bytes", 32 * 2**20),
        (["--fusion-threshold-mb", "0"], "unit_bytes", 65536),
        (["--num-nccl-streams", "2"], "streams", 2),
        (["--autotune"], "tune", True),
        (["--no-autotune"], "tune", False),
        (["--autotune-log-file", "t.jsonl"], "trial_log", "t.jsonl"),
        (["--timeline-filename", "t.json"], "timeline", "t.json"),
        (["--timeline-mark-cycles"], "timeline_mark_cycles", True),
        (["--no-stall-check"], "stall_check", False),
        (["--stall-check-warning-time-seconds", "7"], "stall_warning_s", 7.0),
        (["--stall-check-shutdown-time-seconds", "0"], "stall_shutdown_s", None),
        (["--log-level", "ERROR"], "log_level", 40),
        (["--log-without-timestamp"], "log_time", False),
    ],
)
def test_an_option_becomes_the_ranks_setting(words, field, value):
    options = parse([*words, "-np", "2", "python", "x.py"])
    assert getattr(Settings.from_environ(options.rank_variables), field) == value
    assert options.notes == []


def test_every_option_sets_a_setting_or_is_accepted_with_a_note():
    names = {variable.name for variable in VARIABLES}
    for setting in RANK_SETTINGS:
        value = [] if setting.constant is not None else ["3"]
        options = parse([setting.flag, *value, "-np", "2", "python", "x.py"])
        assert options.command == ["python", "x.py"]
        if setting.variable in WITHOUT_EFFECT:
            assert (options.rank_variables, options.notes[0].split()[0]) == ({}, setting.flag)
        else:
            assert options.rank_variables.keys() == {setting.variable} <= names


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "0"],
        ["-np", "two"],
        ["--start-timeout", "-1"],
        ["--fusion-threshold-mb", "much"],
        ["-H", "a:1", "--hostfile", "f"],
        ["--no-such-option"],
        ["--jsrun", "-np", "2"],
    ],
)
def test_a_value_that_cannot_be_meant_ends_with_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse([*words, "python", "x.py"])
    assert stop.value.code == 2
    assert re.search(r"sirtakirun: error: .+", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--np", "did you mean -np?"),
        ("--nproc-per-node=4", "did you mean -np?"),
        ("--host", "did you mean -H?"),
        ("--verbos", "did you mean --verbose?"),
        ("--zzz", "see sirtakirun --help"),
    ],
)
def test_an_option_that_does_not_exist_gets_the_one_that_was_probably_meant(word, hint, capsys):
    with pytest.raises(SystemExit):
        parse([word, "2", "python", "x.py"])
    assert f"{word.partition('=')[0]} is not an option; {hint}" in capsys.readouterr().err


def test_help_has_examples_and_one_paragraph_on_options_without_effect():
    text = build_parser().format_help()
    assert "sirtakirun -np 4 python train.py" in text
    options, accepted = text.split("accepted from horovodrun, without effect: ")
    for flag in ("--cycle-time-ms", "--disable-cache", "--mpi-threads-disable", "--gloo"):
        assert f" {flag}" not in options
        assert flag in accepted
    assert all(len(line) < 90 for line in text.splitlines())


# ── config file ───────────────────────────────────────────────────────────────────────────────────────────────────────


def arguments(tmp_path, content, name="c.json"):
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return arguments_from_file(file, option_names())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"fusion-threshold-mb": 32}, ["--fusion-threshold-mb", "32"]),
        ({"params": {"fusion_threshold_mb": 32}}, ["--fusion-threshold-mb", "32"]),
        ({"params": {"hierarchical_allreduce": False}}, ["--no-hierarchical-allreduce"]),
        ({"params": {"hierarchical_allreduce": True}}, ["--hierarchical-allreduce"]),
        ({"autotune": {"enabled": True, "log-file": "a.txt"}}, ["--autotune", "--autotune-log-file", "a.txt"]),
        ({"autotune": {"enabled": False}}, ["--no-autotune"]),
        ({"timeline": {"filename": "t", "mark-cycles": True}}, ["--timeline-filename", "t", "--timeline-mark-cycles"]),
        ({"stall-check": {"enabled": False}}, ["--no-stall-check"]),
        ({"stall-check": {"enabled": True}}, []),
        ({"stall-check": {"warning-time-seconds": 5}}, ["--stall-check-warning-time-seconds", "5"]),
        ({"logging": {"level": "INFO", "hide-timestamp": True}}, ["--log-level", "INFO", "--log-without-timestamp"]),
        ({"verbose": False, "tcp": True, "mpi-args": None}, ["--tcp"]),
    ],
)
def test_horovodruns_layout_becomes_options(tmp_path, content, words):
    assert arguments(tmp_path, content) == words
    parse([*words, "-np", "1", "python"])


def test_toml_and_yaml_are_equivalent_to_json(tmp_path):
    words = ["--timeline-filename", "t.json", "--num-nccl-streams", "2"]
    assert arguments(tmp_path, '[timeline]\nfilename = "t.json"\n[params]\nnum-nccl-streams = 2\n', "c.toml") == words
    pytest.importorskip("yaml", reason="PyYAML is not installed: --config-file takes TOML and JSON")
    assert arguments(tmp_path, "timeline:\n  filename: t.json\nparams:\n  num-nccl-streams: 2\n", "c.yaml") == words


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", {"fusion-threshold": 1}, "did you mean 'fusion-threshold-mb'"),
        ("c.json", {"autotune": {"enable": True}}, "contains 'enable', which is not an option"),
        ("c.json", "{", "cannot be read"),
        ("c.json", "[1]", "must contain a mapping of options to values, found list"),
        ("c.toml", "=", "cannot be read"),
    ],
)
def test_an_invalid_file_is_rejected_with_the_reason(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message):
        arguments(tmp_path, content, name)


# ── rank command ──────────────────────────────────────────────────────────────────────────────────────────────────────


RUNNER = ("-c", RUN_RANK)


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("#!/usr/bin/env python\n")
    return "train.py"


def words(*command, as_horovod=False, check_files=True):
    return rank_command(command, as_horovod=as_horovod, check_files=check_files).words


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), ("train.py", "--lr", "1")),
        (("-u", "-W", "error", "-X", "dev"), ("train.py", "-m", "-c")),
        (("-u",), ("-m", "json.tool", "x")),
        ((), ("-c", "print(1)")),
    ],
)
def test_python_runs_the_script_inside_the_runner(script, options, arguments):
    for flags in ((), ("--as-horovod",)):
        found = words(sys.executable, *options, *arguments, as_horovod=bool(flags))
        assert found == (sys.executable, *options, *RUNNER, *flags, "--", *arguments)


def test_an_executable_python_script_is_run_by_its_interpreter(tmp_path):
    program = tmp_path / "tool"
    program.write_text(f"#!{sys.executable} -u\n")
    program.chmod(0o755)
    assert words(str(program), "x") == (sys.executable, "-u", *RUNNER, "--", str(program), "x")


@pytest.mark.parametrize(
    "command", [("sh", "-c", "true"), (sys.executable,), (sys.executable, "-"), (sys.executable, "-V")]
)
def test_programs_other_than_python_scripts_are_run_unchanged(command):
    assert words(*command) == (sys.executable, *RUNNER, "--exec", "--", *command)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((), "the command to run is missing"),
        ((sys.executable, "nothere.py"), "the script 'nothere.py' was not found"),
        (("nothere",), "the program 'nothere' was not found on PATH"),
        (("train.py",), "python train.py"),
    ],
)
def test_a_missing_file_is_rejected_before_anything_starts(script, command, message):
    with pytest.raises(ConfigError, match=message):
        words(*command)


@pytest.mark.parametrize("program", [(sys.executable, "-c", "1"), ("sh", "-c", "true")])
def test_a_colon_which_begins_the_next_program_for_mpiexec_reaches_the_script_all_the_same(program):
    arguments = (":", "\\:", "\\\\:", "a:b", "", "\\")
    passed = words(*program, *arguments)
    assert ":" not in passed
    assert tuple(map(unescape, passed[-len(arguments) :])) == arguments


# ── mpi command ───────────────────────────────────────────────────────────────────────────────────────────────────────


MPIEXEC = Path("/opt/mpi/bin/mpiexec")


def library(vendor, *version):
    return MpiLibrary(vendor=vendor, version=version, library=None, mpi4py="4.1.0", horovod=None)


def line(vendor, *version, **changes):
    plain = {"ranks": 2, "hosts": (), "command": ("python", "x.py"), "exported": (), "oversubscribed": False}
    return " ".join(mpiexec_command(LaunchSpec(**{**plain, **changes}), MPIEXEC, library(vendor, *version)))


def test_a_plain_job_under_each_mpiexec():
    five = line("Open MPI", 5, 0, 11)
    assert five.startswith("/opt/mpi/bin/mpiexec -np 2 --map-by slot:OVERSUBSCRIBE --bind-to none --output tag ")
    assert five.endswith(" python x.py")
    assert "--tag-output" in line("Open MPI", 4, 1, 6)
    assert line("MPICH", 5, 0, 2) == "/opt/mpi/bin/mpiexec -np 2 -prepend-rank python x.py"


def test_hosts_network_and_binding_in_the_words_of_each():
    changes = {
        "hosts": (Host(name="a", slots=2), Host(name="b", slots=1)),
        "interfaces": ("eth0", "eth1"),
        "tcp": True,
        "binding": ("--bind-to", "core"),
        "extra": ("--quiet",),
        "exported": ("FOO",),
    }
    open_mpi = line("Open MPI", 5, 0, 11, **changes)
    for part in (
        "--host a:2,b:1", "--mca btl_tcp_if_include eth0,eth1", "--prtemca prte_if_include eth0,eth1",
        "--mca btl self,sm,tcp", "--bind-to core", "-x FOO", "--quiet python",
    ):  # fmt: skip
        assert part in open_mpi
    assert "--bind-to none" not in open_mpi
    assert "oob_tcp_if_include eth0,eth1" in line("Open MPI", 4, 1, 6, **changes)
    hydra = line("Intel MPI", 2021, 9, **changes)
    for part in ("-hosts a:2,b:1", "-iface eth0", "-genv FI_PROVIDER tcp", "--bind-to core", "--quiet python"):
        assert part in hydra


def test_ssh_options_reach_every_kind_of_mpiexec():
    job = LaunchSpec(ranks=1, hosts=(), command=(), exported=(), oversubscribed=False, ssh=("-p", "22", "-i", "my key"))
    assert set(ssh_variables(job, {}).values()) == {"-p 22 -i 'my key'"}
    assert len(ssh_variables(job, {})) == 3
    assert ssh_variables(job, {"PRTE_MCA_plm_ssh_args": "-C"})["PRTE_MCA_plm_ssh_args"] == "-p 22 -i 'my key' -C"
    assert ssh_words(job, {"OMPI_MCA_plm_rsh_args": "-o A=1"}) == ("-p", "22", "-i", "my key", "-o", "A=1")


def test_a_silent_host_is_noticed_within_the_heartbeat_and_unshared_networks_are_ignored():
    changes = {"hosts": (Host(name="a", slots=2), Host(name="b", slots=1)), "left_out": ("172.17.0.0/16",)}
    words = line("Open MPI", 5, 0, 11, silent_s=30.0, **changes)
    for part in (
        "--prtemca oob_tcp_keepalive_time 10", "--prtemca oob_tcp_keepalive_intvl 5",
        "--prtemca oob_tcp_keepalive_probes 4", "--mca btl_tcp_if_exclude 127.0.0.0/8,172.17.0.0/16",
    ):  # fmt: skip
        assert part in words
    assert "keepalive" not in line("Open MPI", 5, 0, 11, silent_s=None, **changes)
    assert "keepalive" not in line("Open MPI", 5, 0, 11, silent_s=30.0)
    assert "exclude" not in line("Open MPI", 5, 0, 11, interfaces=("eth0",), **changes)


# ── as horovod ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
            del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(SHIM)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    forget()


def test_imported_names_are_sirtakis_own_objects() -> None:
    install()
    install()
    assert [isinstance(finder, HorovodFinder) for finder in sys.meta_path].count(True) == 1
    assert importlib.import_module("horovod.torch") is sirtaki.torch
    assert importlib.import_module("horovod.torch.elastic") is sirtaki.torch.elastic
    assert importlib.import_module("horovod.torch.elastic.state") is sys.modules["sirtaki.torch.elastic.state"]
    assert importlib.import_module("horovod.ray") is sys.modules["sirtaki.ray"]
    assert importlib.import_module("horovod.common.process_sets") is sirtaki.torch.process_sets
    for name in ("exceptions", "util", "basics"):
        assert importlib.import_module(f"horovod.common.{name}").__name__.startswith("sirtaki.torch.")
    assert sirtaki.torch.__spec__ is not None
    assert sirtaki.torch.__spec__.name == "sirtaki.torch"  # its own, not the alias's


@pytest.mark.parametrize(
    "name",
    ["horovod.tensorflow", "horovod.torch.nothing", "horovod.common.nothing", "horovod.ray.nothing", "horovod.x.y"],
)
def test_names_without_a_counterpart_raise_an_error(name: str) -> None:
    with pytest.raises(
        ModuleNotFoundError, match=f"import of {name} failed, because Sirtaki replaces Horovod"
    ) as caught:
        HorovodFinder().find_spec(name)
    assert caught.value.name == name
