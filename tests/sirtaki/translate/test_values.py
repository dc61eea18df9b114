import libcst as cst
import pytest

from sirtaki.translate.source import ALL, BATCH, COUNT, Over, Value, all_alike, collected, combined, either

MEAN, SUM = Value(over=Over.MEAN), Value(over=Over.SUM)


@pytest.mark.parametrize(
    ("left", "operator", "right", "over"),
    [
        (MEAN, cst.Add(), MEAN, Over.MEAN),
        (MEAN, cst.Add(), ALL, Over.MEAN),
        (SUM, cst.Add(), ALL, Over.UNKNOWN),
        (SUM, cst.Subtract(), SUM, Over.SUM),
        (MEAN, cst.Multiply(), COUNT, Over.SUM),
        (ALL, cst.Multiply(), MEAN, Over.MEAN),
        (MEAN, cst.Multiply(), MEAN, Over.UNKNOWN),
        (SUM, cst.Divide(), ALL, Over.SUM),
        (SUM, cst.Divide(), COUNT, Over.MEAN),
        (ALL, cst.Divide(), SUM, Over.UNKNOWN),
        (MEAN, cst.Power(), ALL, Over.UNKNOWN),
        (ALL, cst.Add(), ALL, Over.ALL),
    ],
)
def test_arithmetic_keeps_means_and_sums_apart(
    left: Value, operator: cst.BaseBinaryOp, right: Value, over: Over
) -> None:
    assert combined(operator, left, right).over is over


def test_what_is_one_or_another_is_known_where_they_agree() -> None:
    assert either(MEAN, ALL) == MEAN
    assert either(MEAN, SUM).over is Over.UNKNOWN
    assert all_alike([ALL, MEAN, MEAN]) == MEAN
    assert all_alike([MEAN, BATCH]).over is Over.UNKNOWN
    pair = either(Value(items=(MEAN, ALL)), Value(items=(MEAN, SUM)))
    assert pair.items == (MEAN, SUM)
    assert pair.own


def test_a_count_in_a_list_is_a_number_like_others() -> None:
    assert COUNT.count
    assert not collected(Value(items=(COUNT,))).items[0].count
