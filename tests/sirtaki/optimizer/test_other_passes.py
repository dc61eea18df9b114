"""Nothing is found where no package brings anything; the rest is told by the tests of both kinds of passes."""

from sirtaki.analysis.plan_search import others


def test_a_group_that_nobody_knows_has_none() -> None:
    assert others("sirtaki.nothing", ("name",)) == []
