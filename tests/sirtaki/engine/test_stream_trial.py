"""The comparison of one stream with two: alternating measurements, and the result in words."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes.gradients import LonelyRouter

from sirtaki.comm.device import Device
from sirtaki.comm.plan import Algorithm, CommPlan, TransportKind
from sirtaki.comm.transports.contract import NOTHING_TO_DO, FlatBuffer, Work
from sirtaki.engine import stream_trial
from sirtaki.engine.stream_trial import ROUNDS, UNIT_BYTES, UNITS, StreamTrial, try_streams


class Clock(Device):
    """Time passes only while plans run."""

    now_s = 0.0

    def record_event(self, *, timed: bool = False) -> float:
        return self.now_s


class Router(LonelyRouter):
    """Takes so long for a plan; the first time on so many streams, ten times as long."""

    def __init__(self, limit: int, takes_s: dict[int, float]) -> None:
        super().__init__(Clock())
        self.routes = ((TransportKind.NCCL, Algorithm.FLAT), (TransportKind.NCCL, Algorithm.HIERARCHICAL))
        self._limit, self._takes_s = limit, takes_s
        self.ran: list[CommPlan] = []

    def max_streams(self) -> int:
        return self._limit

    def all_reduce_plan(self, buffer: FlatBuffer, plan: CommPlan, *, scale: float) -> list[Work]:
        assert buffer.tensor.numel() == plan.numel
        assert self.opened[-1] == plan
        first = plan not in self.ran
        self.ran.append(plan)
        self.device.now_s += self._takes_s[plan.streams] * (10 if first else 1)  # type: ignore[attr-defined]
        return [NOTHING_TO_DO]


def tried(router: Router, *, slower_rank: float = 1.0) -> StreamTrial:
    control: Any = SimpleNamespace(
        barrier=lambda: None, maximum=lambda values: np.asarray(values, dtype=float) * slower_rank
    )
    return try_streams(control, router)  # type: ignore[arg-type]


def test_streams_take_turns_and_the_rounds_that_open_connections_do_not_count() -> None:
    router = Router(4, {1: 2.0, 2: 1.0})
    found = tried(router)
    assert found == StreamTrial(transport="nccl", max_streams=4, one_s=2.0, two_s=1.0)
    assert [plan.streams for plan in router.ran] == [1, 2] * (ROUNDS + 1)
    two = router.ran[1]
    assert [unit.stream for unit in two.units] == [0, 1] * (UNITS // 2)
    assert {unit.numel * torch.float32.itemsize for unit in two.units} == {UNIT_BYTES}


def test_of_a_single_round_the_first_one_does_not_count_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_trial, "ROUNDS", 1)
    assert tried(Router(4, {1: 2.0, 2: 1.0})).one_s == 2.0


def test_the_slowest_rank_counts() -> None:
    assert tried(Router(2, {1: 2.0, 2: 1.0}), slower_rank=3.0).one_s == 6.0


def test_where_two_are_not_possible_one_is_tried() -> None:
    found = tried(Router(1, {1: 2.0}))
    assert found.two_s is None
    assert found.describe() == "one NCCL stream only"


@pytest.mark.parametrize(
    ("one_s", "two_s", "words"),
    [
        (2.0, 1.0, "two NCCL streams overlap: 16 × 2 MiB are reduced 2.00× faster than on one"),
        (
            1.02,
            1.0,
            "two NCCL streams do not overlap, or one fills the link: 16 × 2 MiB are reduced 1.02× faster than on one",
        ),
        (
            1.0,
            1.25,
            "two NCCL streams do not overlap, or one fills the link: 16 × 2 MiB are reduced 1.25× slower than on one",
        ),
    ],
)
def test_the_result_is_described_in_words(one_s: float, two_s: float, words: str) -> None:
    assert StreamTrial(transport="nccl", max_streams=2, one_s=one_s, two_s=two_s).describe() == words


def test_ranks_that_nccl_cannot_connect_get_an_error() -> None:
    trial = StreamTrial(transport="staged", max_streams=2, one_s=1.0, two_s=1.0)
    assert "NCCL does not connect these GPUs" in trial.describe()
