"""What the options of a job whose ranks come and go mean."""

import pytest

from sirtaki.errors import ConfigError
from sirtaki.run.elastic.job_members import OnFailure, Policy
from sirtaki.run.elastic.launch import policy_of
from sirtaki.run.options import is_elastic, parse

SCRIPT = ["python", "train.py"]


def policy(*words: str, slots: int = 4) -> Policy:
    return policy_of(parse([*words, *SCRIPT]), {"a": slots}, timeout_s=600.0)


def test_defaults() -> None:
    found = policy("-np", "3", "--min-np", "2")
    assert (found.start_ranks, found.min_ranks, found.max_ranks) == (3, 2, None)
    assert (found.on_failure, found.cooldown_s, found.reset_limit) == (OnFailure.REPLACE_RANK, (30.0, 600.0), None)
    assert policy("--min-np", "2").start_ranks == 2
    assert policy("-np", "2", "--max-np", "4").min_ranks == 2


def test_under_horovods_name_a_failure_drops_the_host_for_good_as_there() -> None:
    found = policy("--min-np", "2", "--as-horovod")
    assert (found.on_failure, found.cooldown_s) == (OnFailure.DROP_HOST, None)
    words = ("--min-np", "2", "--as-horovod", "--on-failure", "replace-rank", "--blacklist-cooldown-range", "5", "50")
    found = policy(*words)
    assert (found.on_failure, found.cooldown_s) == (OnFailure.REPLACE_RANK, (5.0, 50.0))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-np", "1", "--min-np", "2"), "each must be at least the one before"),
        (("--min-np", "3", "--max-np", "2"), "each must be at least the one before"),
        (("--min-np", "5"), "the hosts have 4 slots and will not get more"),
        (("--min-np", "1", "--blacklist-cooldown-range", "9", "3"), "the first is the shorter one"),
        (("--min-np", "1", "--reset-limit", "-1"), "give a number from 0"),
    ],
)
def test_what_contradicts_itself_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(*words)


def test_jobs_with_a_fixed_number_of_ranks_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_elastic(parse(["-np", "2", *SCRIPT]))
    assert is_elastic(parse(["--host-discovery-script", "./hosts.sh", *SCRIPT]))
    with pytest.raises(SystemExit):
        parse(["-np", "2", "--reset-limit", "3", *SCRIPT])
    assert "--reset-limit is for ranks that come and go; give --min-np, too" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--host-discovery-script", "x", "-H", "a:1", *SCRIPT])
