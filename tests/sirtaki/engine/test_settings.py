import contextlib
import dataclasses
import inspect
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.comm.plan import Algorithm, TransportKind
from sirtaki.engine.settings import REMOVED, TRACE, VARIABLES, WITHOUT_EFFECT, ProfileRequest, Settings
from sirtaki.errors import ConfigError


def test_an_empty_environment_gives_the_defaults():
    settings = Settings.from_environ({})
    assert settings == Settings()
    assert settings.tune
    assert settings.warmup_iterations == 100
    assert (settings.stall_warning_s, settings.stall_shutdown_s) == (60.0, 600.0)


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"SIRTAKI_TUNE": "0"}, "tune", False),
        ({"HOROVOD_AUTOTUNE": "0"}, "tune", False),
        ({"HOROVOD_AUTOTUNE": "1"}, "tune", True),
        ({"SIRTAKI_WARMUP_ITERATIONS": "0"}, "warmup_iterations", 0),
        ({"SIRTAKI_UNIT_BYTES": "256 KiB"}, "unit_bytes", 262144),
        ({"SIRTAKI_UNIT_BYTES": "1.5MiB"}, "unit_bytes", 1572864),
        ({"SIRTAKI_UNIT_BYTES": "4096"}, "unit_bytes", 4096),
        ({"HOROVOD_FUSION_THRESHOLD": "67108864"}, "unit_bytes", 67108864),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, "unit_bytes", 65536),
        ({"HOROVOD_NUM_NCCL_STREAMS": "3"}, "streams", 3),
        ({"SIRTAKI_TRANSPORT": "shared_memory"}, "transport", TransportKind.SHARED_MEMORY),
        ({"SIRTAKI_TRANSPORT": "GLOO"}, "transport", TransportKind.GLOO),
        ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}, "algorithm", Algorithm.HIERARCHICAL),
        ({"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}, "algorithm", Algorithm.FLAT),
        ({"SIRTAKI_ALGORITHM": "hierarchical"}, "algorithm", Algorithm.HIERARCHICAL),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, "stall_check", False),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, "stall_warning_s", 5.0),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, "stall_shutdown_s", None),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}, "stall_shutdown_s", 90.0),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, "gloo_interface", "eth0,eth1"),
        ({"HOROVOD_LOG_LEVEL": "FATAL"}, "log_level", logging.CRITICAL),
        ({"HOROVOD_LOG_LEVEL": "trace"}, "log_level", TRACE),
        ({"HOROVOD_LOG_HIDE_TIME": "1"}, "log_time", False),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, "timeline", "DYNAMIC"),
        ({"SIRTAKI_REGISTRY": "off"}, "registry", "off"),
        ({"SIRTAKI_STREAMS": "  "}, "streams", None),
        ({"SIRTAKI_LOSSY": "int8, PowerSGD,topk:.05,int8"}, "lossy", ("int8", "powersgd:4", "topk:0.05")),
        ({"SIRTAKI_METRICS_PORT": "9400"}, "metrics", ("127.0.0.1", 9400)),
        ({"SIRTAKI_METRICS_PORT": "0.0.0.0:9400"}, "metrics", ("0.0.0.0", 9400)),
        ({"SIRTAKI_PROFILE": "here"}, "profile", ProfileRequest(folder="here")),
        (
            {"SIRTAKI_PROFILE": "a/b?iterations=3&operators=no&edges=1"},
            "profile",
            ProfileRequest(folder="a/b", iterations=3, operators=False, edges=True),
        ),
    ],
)
def test_a_variable_sets_its_field(environ, field, value):
    assert getattr(Settings.from_environ(environ), field) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SIRTAKI_TUNE", "perhaps"),
        ("HOROVOD_AUTOTUNE", "2"),
        ("SIRTAKI_WARMUP_ITERATIONS", "-1"),
        ("SIRTAKI_UNIT_BYTES", "0"),
        ("SIRTAKI_UNIT_BYTES", "4 MB"),
        ("SIRTAKI_UNIT_BYTES", "nan"),
        ("SIRTAKI_UNIT_BYTES", "inf"),
        ("HOROVOD_FUSION_THRESHOLD", "-5"),
        ("HOROVOD_FUSION_THRESHOLD", "64 MiB"),
        ("SIRTAKI_STREAMS", "0"),
        ("SIRTAKI_LOSSY", "int8,int4"),
        ("SIRTAKI_LOSSY", "topk:2"),
        ("SIRTAKI_STREAMS", "two"),
        ("SIRTAKI_TRANSPORT", "pigeon"),
        ("SIRTAKI_ALGORITHM", "tree"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "0"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "nan"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-1"),
        ("SIRTAKI_LOG_LEVEL", "loud"),
        *(("SIRTAKI_METRICS_PORT", text) for text in ("0", ":9400", "a:b", "x")),
        *(("SIRTAKI_PROFILE", text) for text in ("?edges=1", "here?edges", "here?edges=2", "here?what=1")),
    ],
)
def test_an_implausible_value_is_rejected_with_the_accepted_ones(name, value):
    accepts = next(variable.accepts for variable in VARIABLES if variable.name == name)
    with pytest.raises(ConfigError) as caught:
        Settings.from_environ({name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert accepts in str(caught.value)


def test_sirtakis_own_name_has_priority_over_horovods():
    both = {"SIRTAKI_TUNE": "1", "HOROVOD_AUTOTUNE": "0", "HOROVOD_NUM_NCCL_STREAMS": "2", "SIRTAKI_STREAMS": "5"}
    assert Settings.from_environ(both).tune
    assert Settings.from_environ(both).streams == 5
    assert Settings.from_environ(dict(reversed(both.items()))).streams == 5


def test_a_losing_variable_is_still_checked():
    with pytest.raises(ConfigError, match="HOROVOD_NUM_NCCL_STREAMS"):
        Settings.from_environ({"SIRTAKI_STREAMS": "2", "HOROVOD_NUM_NCCL_STREAMS": "many"})


def test_a_misspelt_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="most similar setting is SIRTAKI_STREAMS"):
        Settings.from_environ({"SIRTAKI_STREAM": "2"})


def test_the_tests_own_variables_and_the_launchers_are_no_settings():
    assert Settings.from_environ({"SIRTAKI_TEST_X": "1", "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4"}) == Settings()


def test_variables_without_effect_leave_a_note_each():
    settings = Settings.from_environ(dict.fromkeys(WITHOUT_EFFECT, "1"))
    assert len(settings.notes) == len(WITHOUT_EFFECT)
    assert any(note.startswith("HOROVOD_CYCLE_TIME has no effect here:") for note in settings.notes)
    assert dataclasses.replace(settings, notes=()) == Settings()


def test_a_removed_setting_is_one_warning_that_names_its_replacement():
    settings = Settings.from_environ({"SIRTAKI_SEED": "7", "SIRTAKI_PROFILE_EDGES": "1"})
    assert settings.warnings == (
        "SIRTAKI_SEED is no setting any more: the tuner always draws from the same seed",
        "SIRTAKI_PROFILE_EDGES is no setting any more: use SIRTAKI_PROFILE=FOLDER?edges=1",
    )
    assert dataclasses.replace(settings, warnings=()) == Settings()
    assert not set(REMOVED) & {variable.name for variable in VARIABLES}


def test_the_recording_options_are_parsed_from_text():
    asked = ProfileRequest(folder="/tmp/a b", iterations=4, operators=True, edges=True)
    assert ProfileRequest.parse(str(asked)) == asked


def test_every_field_is_documented_and_can_be_set_by_a_variable():
    fields = {field.name for field in dataclasses.fields(Settings)}
    assert fields - {"notes", "warnings"} == {variable.field for variable in VARIABLES}
    assert all(f"\n    {name}: " in inspect.cleandoc(Settings.__doc__ or "") for name in fields)


@given(st.sampled_from(VARIABLES), st.text(max_size=12))
def test_any_text_gives_settings_or_a_config_error(variable, text):
    with contextlib.suppress(ConfigError):
        assert isinstance(Settings.from_environ({variable.name: text}), Settings)
