import re
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


def test_without_a_setting_nan_is_reported_once_and_a_log_at_level_trace_has_each_step(
    run_ranks: Callable[..., Any],
) -> None:
    job = run_ranks("nan_loss.py", 2, env={**ENV, "SIRTAKI_CHECK_NAN": "0", "SIRTAKI_LOG": "trace"})
    (line,) = [line for line in job.stderr.splitlines() if "NaN" in line]
    assert "the averaged gradient of 2.weight has a NaN or infinite element in step 20" in line
    steps = re.findall(r"step (\d+)(?: took \S+ ms)?: communication takes \S+ ms, of which", job.stderr)
    assert list(map(int, steps)) == list(range(1, 31))
