"""The replay's physics by hand, and every family of landscapes."""

from __future__ import annotations

import numpy as np
import pytest

from bench.lib.landscapes import families
from bench.lib.landscapes.contenders import CONTENDERS, SIRTAKI
from bench.lib.landscapes.replay import Message, Physics, replay, round_s
from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.plan import TransportKind

PLAIN = Physics(capacity=lambda n, computing: 100.0, latency_s=lambda size: 1.0)


def test_one_message_after_the_computation() -> None:
    assert replay([Message(2.0, 300.0, 0)], compute_s=2.0, physics=PLAIN) == pytest.approx(2 + 1 + 3)


def test_messages_of_one_stream_go_one_after_the_other() -> None:
    messages = [Message(0.0, 100.0, 0), Message(0.0, 100.0, 0)]
    assert replay(messages, compute_s=0.0, physics=PLAIN) == pytest.approx(4.0)


def test_messages_of_two_streams_share_the_rate_and_their_latencies_overlap() -> None:
    messages = [Message(0.0, 100.0, 0), Message(0.0, 100.0, 1)]
    assert replay(messages, compute_s=0.0, physics=PLAIN) == pytest.approx(3.0)


def test_communication_hides_behind_computation() -> None:
    assert replay([Message(1.0, 100.0, 0)], compute_s=9.0, physics=PLAIN) == pytest.approx(9.0)


def test_a_host_serves_one_message_at_a_time() -> None:
    physics = Physics(capacity=lambda n, computing: 1e9, latency_s=lambda size: 0.0, host_s=lambda size: 2.0)
    assert round_s(1.0, 4, 1, physics) == pytest.approx(8.0)


def test_quality_and_capacity_beside_computation() -> None:
    physics = Physics(
        capacity=lambda n, computing: 10.0 if computing else 100.0,
        latency_s=lambda size: 0.0,
        quality=lambda size: 0.5,
    )
    # 200 bytes of work; 10 of them beside the last second of computation
    assert replay([Message(1.0, 100.0, 0)], compute_s=2.0, physics=physics) == pytest.approx(2 + 1.9)


def test_communication_slows_computation_down() -> None:
    physics = Physics(capacity=lambda n, computing: 50.0, latency_s=lambda size: 0.0, slowdown=lambda n: 1.0 + n)
    # From 1 s on, two seconds of transfer let one second of computation pass; then the other two go on alone.
    assert replay([Message(1.0, 100.0, 0)], compute_s=4.0, physics=physics) == pytest.approx(1 + 2 + 2)


EVERY_FAMILY = pytest.mark.parametrize(
    "family", [*families.OPEN, *families.HELD_BACK], ids=lambda family: family.__name__
)


@pytest.mark.slow
@EVERY_FAMILY
def test_every_family_has_a_best_setting(family: families.Family) -> None:
    scape = family(np.random.default_rng(99))
    assert 0.0 < scape.span_s(scape.best) <= scape.span_s(scape.default)
    assert scape.regret(scape.best) == 0.0


@EVERY_FAMILY
def test_every_family_gives_planners_a_model_and_is_the_same_again(family: families.Family) -> None:
    scape = family(np.random.default_rng(99))
    assert scape.default in scape.space
    space, model = scape.probed(0.04, np.random.default_rng(0))
    assert scape.default in space
    assert model is not None
    same = family(np.random.default_rng(99))
    knobs = Knobs(unit_bytes=2**20, streams=2, transport=TransportKind.GLOO)
    assert same.span_s(knobs) == scape.span_s(knobs)


@pytest.mark.parametrize("name", [SIRTAKI, "random", "optuna TPE"])
def test_a_contender_keeps_to_its_budget_and_is_judged_without_noise(name: str) -> None:
    scape = families.default_is_best(np.random.default_rng(1))
    outcome = CONTENDERS[name](scape, 30, 0.04, 0)
    assert outcome["iterations"] <= 30
    assert outcome["regret"] >= 0.0
    assert outcome["cost"] >= 1.0
