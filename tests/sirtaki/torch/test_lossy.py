"""The tuner compresses gradients where the user allows it, and where it makes iterations faster."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import RunRanks
from rank_jobs import OVER_MESH

pytestmark = pytest.mark.timeout(300)  # the machine may be busy

ALLOWED = {"SIRTAKI_TRANSPORT": "gloo", "SIRTAKI_LOSSY": "int8,topk:0.05,powersgd:2"}


def result_of(log: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert any("lossy" in record["knobs"] for record in records if record["event"] == "trial")
    return next(record for record in records if record["event"] == "result")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("ranks", "env"), [(2, {}), pytest.param(3, OVER_MESH, marks=pytest.mark.slow)], ids=["2-ranks", "3-ranks"]
)
def test_a_codec_is_kept_on_a_slow_link_and_its_error_is_reported(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, env: dict[str, str]
) -> None:
    log = tmp_path / "trials.jsonl"
    job = run_ranks(
        "lossy.py",
        ranks,
        "slow",
        300,
        # A refinement that keeps another setting with a codec reports the codec again.
        env={**ALLOWED, **env, "SIRTAKI_TRIAL_LOG": str(log), "SIRTAKI_REFINE_UNTIL": "0"},
        timeout_s=250,
    )
    assert job.stdout.count("owes True") == ranks
    assert result_of(log)["knobs"]["lossy"]["large"]
    told = re.findall(
        r"compressed as SIRTAKI_LOSSY allows, by (.+): (\S+) of the bytes; what is left to the next step has (\S+) %",
        job.stderr,
    )
    assert len(told) == 1
    assert 0.01 < float(told[0][1]) < 0.6
    assert float(told[0][2]) > 0.0
    assert "(all ranks, 20 iterations)" in job.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    ("ranks", "env"), [(3, OVER_MESH), pytest.param(2, {}, marks=pytest.mark.slow)], ids=["3-ranks", "2-ranks"]
)
def test_nothing_is_kept_where_bytes_are_free_and_residuals_are_applied(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, env: dict[str, str]
) -> None:
    log = tmp_path / "trials.jsonl"
    job = run_ranks(
        "lossy.py", ranks, "latency", 300, env={**ALLOWED, **env, "SIRTAKI_TRIAL_LOG": str(log)}, timeout_s=250
    )
    assert job.stdout.count("owes False") == ranks
    assert "lossy" not in result_of(log)["knobs"]
    assert "compressed as" not in job.stderr


def test_gradients_that_may_not_be_compressed_are_reported(run_ranks: RunRanks) -> None:
    said = run_ranks("lossy.py", 2, "refused", env=ALLOWED).stderr
    unset = {
        "SIRTAKI_LOSSY=int8,powersgd:2,topk:0.05 has no effect, because " + why
        for why in (
            "the optimizer's compression= compresses these gradients already",
            "gradients of complex64 cannot be compressed",
        )
    }
    assert all(said.count(line) == 1 for line in unset)
    shared = run_ranks("lossy.py", 2, "refused", env={"SIRTAKI_LOSSY": "int8", "SIRTAKI_TRANSPORT": "shared_memory"})
    assert "has no effect, because the optimizer's compression=" in shared.stderr
    wrong = run_ranks("lossy.py", 2, "refused", env={"SIRTAKI_LOSSY": "int8,int4"}, check=False)
    assert wrong.returncode != 0
    assert (
        "SIRTAKI_LOSSY='int8,int4' is invalid; accepted values: a list with commas of fp16, bf16, int8" in wrong.stderr
    )
