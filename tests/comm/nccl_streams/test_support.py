"""Several streams run only where NCCL and CUDA keep them from blocking each other."""

import os
from dataclasses import replace

import pytest

from sirtaki.comm.nccl_streams.process_group import LAUNCH_ORDER, NcclVersions, ask_for_launch_order
from sirtaki.comm.nccl_streams.transport import ALLOWANCES, ctas_for

GOOD = NcclVersions(nccl=(2, 27, 3), cuda_runtime=(12, 8), cuda_driver=(12, 4), launch_order="1")


def test_new_versions_run_several_streams() -> None:
    assert GOOD.max_streams > 1
    assert GOOD.why_one_stream == ""
    assert replace(GOOD, nccl=(2, 26, 0), cuda_runtime=(12, 3), cuda_driver=(13, 0)).max_streams > 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"nccl": (2, 25, 1)}, "NCCL 2.25.1 cannot order"),
        ({"launch_order": ""}, "is not set"),
        ({"launch_order": "0"}, "is 0"),
        ({"cuda_driver": (12, 2)}, "driver is 12.2"),
        ({"cuda_runtime": (11, 8)}, "runtime is 11.8"),
    ],
)
def test_older_ones_run_one_and_say_why(changed: dict[str, object], reason: str) -> None:
    old = replace(GOOD, **changed)  # type: ignore[arg-type]  # one field each
    assert old.max_streams == 1
    assert reason in old.why_one_stream


def test_the_users_own_choice_of_launch_order_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH_ORDER, "0")
    ask_for_launch_order()
    assert os.environ[LAUNCH_ORDER] == "0"
    monkeypatch.delenv(LAUNCH_ORDER)
    ask_for_launch_order()
    assert os.environ[LAUNCH_ORDER] == "1"


@pytest.mark.parametrize(("threads", "ctas"), [(None, None), (128, 1), (512, 1), (1024, 2), (4096, 8), (1_000_000, 32)])
def test_threads_become_ctas(threads: int | None, ctas: int | None) -> None:
    assert ctas_for(threads) == ctas


def test_each_allowance_is_another_number_of_ctas() -> None:
    assert len({ctas_for(threads) for threads in ALLOWANCES}) == len(ALLOWANCES)
