from collections.abc import Callable
from typing import Any

ENV = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "0", "SIRTAKI_CHECK_NAN": "1"}


def test_the_first_rank_parameter_and_iteration_are_named_and_no_later_one(run_ranks: Callable[..., Any]) -> None:
    job = run_ranks("optimizer_nan.py", 2, env=ENV)
    said = [
        line for line in job.stderr.splitlines() if "NaN or infinite gradients" in line or line.startswith("  rank")
    ]
    assert [line.partition("iteration ")[2].partition(",")[0] for line in said if "NaN or infinite" in line] == [
        "2",
        "5",
    ]
    first, *later = [line.strip() for line in said if line.startswith("  rank")]
    assert first == "rank 1: second.bias (4 NaN of 4 elements), second.weight (16 NaN of 16 elements)"
    assert [line.split(" (")[0] for line in later] == ["rank 0: second.bias", "rank 1: second.bias"]
    assert all("infinite" in line for line in later)
    assert "spoiled: True" in job.stdout
