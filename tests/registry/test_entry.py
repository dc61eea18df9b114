import math
from dataclasses import replace
from itertools import permutations

import pytest
from conformance.store import make_entry

from sirtaki.errors import RegistryError
from sirtaki.registry.entry import STALE_AFTER_S, implausible, supersedes


def test_a_complete_entry_beats_an_incomplete_one_whatever_their_speed() -> None:
    complete, incomplete = make_entry(best_span_s=0.9), make_entry(best_span_s=0.1, complete=False, created_s=2e9)
    assert supersedes(complete, incomplete)
    assert not supersedes(incomplete, complete)


def test_of_two_incomplete_ones_the_longer_search_wins() -> None:
    short, long = make_entry(n_trials=3, complete=False), make_entry(n_trials=9, complete=False, best_span_s=0.9)
    assert supersedes(long, short)
    assert not supersedes(short, long)


def test_the_newer_wins_unless_it_is_worse_by_more_than_the_noise() -> None:
    old = make_entry(best_span_s=0.5)
    assert supersedes(make_entry(best_span_s=0.505, created_s=1.7e9 + 1), old)
    assert not supersedes(make_entry(best_span_s=0.6, created_s=1.7e9 + 1, streams=8), old)
    assert supersedes(make_entry(best_span_s=0.6, created_s=1.7e9 + STALE_AFTER_S + 1, streams=8), old)


def test_a_better_one_wins_even_if_it_is_older() -> None:
    assert supersedes(make_entry(best_span_s=0.2, created_s=1.7e9 - 100, streams=8), make_entry(best_span_s=0.5))


def test_of_two_with_the_same_knobs_the_newer_knows_better_what_they_are_worth() -> None:
    five_times, today = make_entry(best_span_s=0.2), make_entry(best_span_s=0.9, created_s=1.7e9 + 1)
    assert supersedes(today, five_times)
    assert not supersedes(five_times, today)


@pytest.mark.parametrize("claim", [{"best_span_s": 1e-6}, {"default_span_s": 1e-6}, {"created_s": 1e10}])
def test_what_no_job_can_have_found_gives_way(claim: dict[str, float]) -> None:
    claimed, found = make_entry(streams=8, **claim), make_entry(best_span_s=0.99, created_s=1.6e9)
    assert implausible(claimed)
    assert not implausible(found)
    assert supersedes(found, claimed)


def test_old_entries_keep_their_ids() -> None:
    assert replace(make_entry().key, gradients="", fixed=()).digest() == "f2386e8d0859c78f54b693320cbdc438"


def test_speeds_are_compared_with_each_jobs_own_default() -> None:
    fast_day = make_entry(best_span_s=0.5, default_span_s=1.0)
    slow_day = make_entry(best_span_s=0.8, default_span_s=3.0, created_s=1.7e9 + 1)
    assert supersedes(slow_day, fast_day)


def test_in_whatever_order_three_are_saved_a_complete_one_stays() -> None:
    entries = [make_entry(), make_entry(complete=False, n_trials=99), make_entry(best_span_s=0.4, streams=8)]
    for order in permutations(entries):
        kept = order[0]
        for entry in order[1:]:
            if supersedes(entry, kept):
                kept = entry
        assert kept == entries[2]


def test_ids_are_the_keys_and_nothing_else() -> None:
    assert make_entry().id == make_entry(best_span_s=0.1, created_s=1.0).id
    assert make_entry().id != make_entry(ranks=6).id


@pytest.mark.parametrize("name", ["best_span_s", "default_span_s", "noise_s"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_times_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(RegistryError, match=name):
        replace(make_entry(), **{name: value})


def test_it_says_what_it_is() -> None:
    assert make_entry().describe() == "Réseau on 4 ranks on 2 hosts"
