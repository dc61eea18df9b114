"""After the warm-up: ranks agree to tune again, in the same iteration, and train right all the while."""

import re
from pathlib import Path

import pytest
from conftest import RunRanks

from sirtaki.engine.tuning.trial_log import read_log

RESTLESS = {"SIRTAKI_WARMUP_ITERATIONS": "7", "SIRTAKI_REGISTRY": "off"}


def re_tunes(output: str, ranks: int) -> int:
    """How many there were, if all ranks had the same ones."""
    assert output.count("on all ranks alike: True") == ranks
    counts = {int(count) for count in re.findall(r"re-tunes (\d+)", output)}
    assert len(counts) == 1
    return counts.pop()


def test_a_slower_link_is_noticed_by_all_ranks_and_settings_are_tried_again(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    env = {"SIRTAKI_WARMUP_ITERATIONS": "15", "SIRTAKI_TRIAL_LOG": str(tmp_path / "trials.jsonl")}
    job = run_ranks("retuning.py", 2, "slower", 300, env=env, timeout_s=120)
    assert re_tunes(job.stdout, 2) == 1
    assert re.search(
        r"communication takes \d.* times as long as when this setting was chosen: trying others", job.stderr
    )
    assert "tuned again in" in job.stderr or "the setting stays" in job.stderr
    log = read_log(tmp_path / "trials.jsonl")
    assert log.result is not None
    assert [retune.result is not None for retune in log.retunes] == [True]
    assert log.retunes[0].measurements


@pytest.mark.parametrize(
    ("ranks", "seed", "streams"),
    [
        (2, 1, ""),
        pytest.param(3, 1, "", marks=pytest.mark.slow),
        *(pytest.param(ranks, seed, "", marks=pytest.mark.slow) for ranks in (2, 3, 4, 5) for seed in (2, 3, 5)),
        *(pytest.param(ranks, seed, "1", marks=pytest.mark.slow) for ranks in (2, 3, 4) for seed in (2, 3, 5, 10)),
    ],
)
def test_training_stays_right_if_ranks_tune_again_at_every_opportunity(
    run_ranks: RunRanks, ranks: int, seed: int, streams: str
) -> None:
    """With ranks that join, backward passes that raise, and two optimizers."""
    env = {**RESTLESS, **({"SIRTAKI_TEST_STREAMS": streams} if streams else {})}
    assert re_tunes(run_ranks("retuning.py", ranks, "restless", seed, 80, env=env, timeout_s=150).stdout, ranks) > 2
