import re

import pytest

from sirtaki.run.options import RANK_SETTINGS, REFUSED, build_parser, parse
from sirtaki.settings import VARIABLES, WITHOUT_EFFECT, Settings

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


def test_every_option_of_horovodrun_is_known():
    known = {flag for action in build_parser()._actions for flag in action.option_strings}
    assert set(re.findall(r"-\S+", HOROVODRUN)) <= known


def test_what_follows_the_script_belongs_to_the_script():
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


def test_an_option_without_effect_is_accepted_with_a_note():
    options = parse(["--cycle-time-ms", "3.5", "--torus-allreduce", "-np", "2", "python", "x.py"])
    assert options.rank_variables == {}
    assert options.command == ["python", "x.py"]
    assert [note.split()[0] for note in options.notes] == ["--cycle-time-ms", "--torus-allreduce"]


def test_every_option_sets_a_setting_or_is_known_to_have_no_effect():
    known = {variable.name for variable in VARIABLES} | set(WITHOUT_EFFECT)
    assert {setting.variable for setting in RANK_SETTINGS} <= known


@pytest.mark.parametrize(("flags", "count", "why"), REFUSED)
def test_what_is_not_there_is_refused_with_the_reason(flags, count, why, capsys):
    for flag in flags:
        with pytest.raises(SystemExit) as stop:
            parse([flag, *["1"] * count, "-np", "2", "python", "x.py"])
        assert stop.value.code == 2
        assert f"{flag}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["-np", "0"],
        ["-np", "two"],
        ["--start-timeout", "-1"],
        ["--fusion-threshold-mb", "much"],
        ["-H", "a:1", "--hostfile", "f"],
        ["--no-such-option"],
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


def test_help_has_examples_and_keeps_what_has_no_effect_to_one_paragraph():
    text = build_parser().format_help()
    assert "sirtakirun -np 4 python train.py" in text
    options, accepted = text.split("accepted from horovodrun, without effect: ")
    for flag in ("--cycle-time-ms", "--disable-cache", "--mpi-threads-disable", "--gloo"):
        assert f" {flag}" not in options
        assert flag in accepted
    assert all(len(line) < 90 for line in text.splitlines())
