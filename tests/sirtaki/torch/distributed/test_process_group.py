"""Process groups of the backend "sirtaki" do what one process would do, and what Gloo's do."""

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH, Job, Play, RankCase, on_ranks, slow

# As on hosts of one rank each, and of two: over Gloo, in both ways.
FLAT = {**OVER_MESH, "SIRTAKI_TRANSPORT": "gloo", "SIRTAKI_STREAMS": "3"}
NODES = {**OVER_MESH, "SIRTAKI_LOCAL_SIZE": "2"}


JOBS = (
    Job(2, env=OVER_MESH),
    slow(Job(1, env=OVER_MESH)),
    slow(Job(3, env=OVER_MESH)),
    slow(Job(2, "gloo", env=FLAT)),
    slow(Job(3, "gloo", env=FLAT)),
    slow(Job(4, "nodes", env=NODES)),
)


@on_ranks("torch_backend", *JOBS)
def test_the_backends_operations_equal_one_process(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


@on_ranks("torch_backend_training", *JOBS, slow(Job(2, "unattached", env={**OVER_MESH, "SIRTAKI_ATTACH": "0"})))
def test_training_over_the_backend_equals_one_process(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.integration)])
def test_drawn_sequences_of_collectives_equal_gloos(run_ranks: RunRanks, ranks: int) -> None:
    output = run_ranks("torch_backend_reference.py", ranks, 120, env=OVER_MESH).stdout
    assert output.count("120 sequences agree") == ranks


@pytest.mark.slow
@pytest.mark.parametrize("env", [OVER_MESH, FLAT, NODES], ids=["host", "gloo", "nodes"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_many_drawn_sequences_equal_gloos(run_ranks: RunRanks, ranks: int, env: dict[str, str]) -> None:
    output = run_ranks("torch_backend_reference.py", ranks, 400, 1, env=env, timeout_s=110).stdout
    assert output.count("400 sequences agree") == ranks
