"""All agents try the same ones in the same order."""

from sirtaki.run.elastic.succession import CANDIDATE_S, CONNECT_S, agents_for_successor, candidates

AGENTS = [(5, [("c", 3)]), (1, [("a", 1)]), (3, [("b", 2)])]


def test_from_the_lowest_number_and_longest_where_this_agent_starts_it() -> None:
    found = list(candidates(AGENTS, 3))
    assert [(each.number, each.places, each.is_own, each.timeout_s) for each in found] == [
        (1, [("a", 1)], False, CANDIDATE_S),
        (3, [("b", 2)], True, CONNECT_S),
        (5, [("c", 3)], False, CANDIDATE_S),
    ]


def test_a_driver_expects_those_that_have_not_tried_to_start_another_one_first() -> None:
    assert agents_for_successor(AGENTS, 3) == {"agents": [5, 3], "numbers": 5}
