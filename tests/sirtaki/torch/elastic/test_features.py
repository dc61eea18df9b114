"""Whatever a rank waits in, it hears of a loss soon; process sets are opened again as far as they fit."""

from pathlib import Path

import pytest
from elastic_jobs import ElasticJob
from rank_jobs import Launcher
from ranks.elastic_features import WAITS

SOON_S = 2.0


@pytest.mark.slow
def test_every_wait_ends_with_an_error_of_horovods_name_on_all_that_are_left(
    launcher: Launcher, tmp_path: Path
) -> None:
    with ElasticJob(launcher, tmp_path, ranks=len(WAITS) + 1, program="elastic_features.py", play="waits") as job:
        judge = job.run(90.0)
    assert sorted(code for code in judge.codes.values() if code is not None) == [-9] * len(WAITS) + [0], judge.codes
    for step, kill in enumerate(judge.lines("kill")):
        raised = [line for line in judge.lines("raised") if line["step"] == step]
        assert {line["worker"] for line in raised} == {0, *range(step + 2, len(WAITS) + 1)}
        assert max(line["s"] for line in raised) - kill["s"] < SOON_S
    assert not judge.lines("returned")


def test_process_sets_and_their_optimizers_are_those_of_the_present_ranks(launcher: Launcher, tmp_path: Path) -> None:
    with ElasticJob(launcher, tmp_path, ranks=3, program="elastic_features.py", play="sets") as job:
        judge = job.run()
    assert judge.codes == {0: 0, 1: -9, 2: 0}, judge.logs
    before = {line["rank"]: line for line in judge.lines("train") if line["size"] == 3}
    after = {line["rank"]: line for line in judge.lines("train") if line["size"] == 2}
    assert [before[rank].get("first") for rank in range(3)] == [2.0, 2.0, None]
    assert [before[rank].get("outer") for rank in range(3)] == [2.0, None, 2.0]
    assert [before[rank]["weight"] for rank in range(3)] == [-1.5, -1.5, -3.0]
    assert [after[rank]["first"] for rank in range(2)] == [2.0, 2.0]
    assert all("does not fit the 2 ranks" in after[rank]["outer"] for rank in range(2))
    assert [after[rank]["weight"] for rank in range(2)] == [-1.5, -1.5]


def test_a_rank_that_is_lost_before_training_ends_no_other_script(launcher: Launcher, tmp_path: Path) -> None:
    with ElasticJob(launcher, tmp_path, ranks=3, program="elastic_features.py", play="beginning") as job:
        judge = job.run()
    assert judge.codes == {0: 0, 1: -9, 2: 0}, judge.output
    assert [(line["size"], line["weight"]) for line in judge.lines("train")] == [(2, -4.5)] * 2
