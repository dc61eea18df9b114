import json

import pytest

from sirtaki.errors import ConfigError
from sirtaki.run.options import arguments_from_file, option_names, parse


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


def test_toml_and_yaml_say_the_same_as_json(tmp_path):
    words = ["--timeline-filename", "t.json", "--num-nccl-streams", "2"]
    assert arguments(tmp_path, '[timeline]\nfilename = "t.json"\n[params]\nnum-nccl-streams = 2\n', "c.toml") == words
    pytest.importorskip("yaml", reason="PyYAML is not installed: --config-file takes TOML and JSON")
    assert arguments(tmp_path, "timeline:\n  filename: t.json\nparams:\n  num-nccl-streams: 2\n", "c.yaml") == words


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.json", {"fusion-threshold": 1}, "nearest one is 'fusion-threshold-mb'"),
        ("c.json", {"autotune": {"enable": True}}, "'enable' is not an option"),
        ("c.json", "{", "cannot be read"),
        ("c.json", "[1]", "must hold options"),
        ("c.toml", "=", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message):
        arguments(tmp_path, content, name)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        arguments_from_file(tmp_path / "none.json", option_names())
