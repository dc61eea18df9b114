"""What an arm can say beside proposing is asked of those that can, and of nobody else."""

from collections.abc import Sequence

import pytest
from conformance.arm import ARM_CHECKS
from fakes.warmup_job import BEST, DEFAULT, Believer, ListArm, Sure

from sirtaki.autotune.arms.base import Nobody, expected_improvement, expected_span_s, promise
from sirtaki.autotune.knobs import Knobs


class Screens(ListArm):
    def promise(self, candidates: Sequence[Knobs]) -> Sequence[float] | None:
        return [0.5 if knobs == BEST else 0.0 for knobs in candidates]


@pytest.mark.parametrize("check", ARM_CHECKS, ids=lambda check: check.__name__)
def test_nobody_is_an_arm(check) -> None:
    check(lambda space, rng: Nobody())


def test_nobody_has_nothing_to_propose_however_often_it_is_asked() -> None:
    nobody = Nobody()
    assert list(nobody.ask(5)) == []
    nobody.tell([])
    assert list(nobody.ask()) == []


def test_an_arm_without_a_surrogate_has_no_opinion() -> None:
    for arm in (Nobody(), ListArm(BEST)):
        assert expected_improvement(arm) is None
        assert expected_span_s(arm, BEST) is None
        assert promise(arm, [BEST, DEFAULT]) is None


def test_an_arm_that_can_say_is_asked() -> None:
    assert expected_improvement(Sure(0.25)) == 0.25
    assert expected_span_s(Believer(BEST), BEST) == 0.01
    assert expected_span_s(Believer(BEST), DEFAULT) == 1.0
    assert promise(Screens(), [DEFAULT, BEST]) == [0.0, 0.5]
    assert promise(Screens(), []) == []


def test_each_opinion_is_one_of_its_own() -> None:
    assert expected_span_s(Sure(0.25), BEST) is None
    assert expected_improvement(Believer(BEST)) is None
