"""What each single remedy brings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.compiled_jobs import compiled_job
from fakes.played_jobs import made_job, plan_of
from fakes.replays import LINK, SIZES, on_one_host, over_a_link, times

from sirtaki.analysis.what_if import (
    best_knobs,
    knobs_of,
    price_error,
    price_notes,
    remedies,
    single_remedies,
    unanswered,
    with_plans,
)
from sirtaki.autotune.knobs import Knobs
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import ReplayError
from sirtaki.measures import LinkModel


def test_remedies_are_for_what_is_there_the_best_first() -> None:
    durations = (0.02, 0.01, 0.03, 0.02)
    job = made_job(
        durations_s={0: durations, 1: durations, 2: tuple(9 * seconds for seconds in durations)},
        sizes=SIZES,
        plan=plan_of(SIZES, (4,)),
        link=LINK,
        data_s=dict.fromkeys(range(3), 0.03),
    )
    found = remedies(job, before_s=times(job).iteration_s)
    words = [one.words for one in found]
    assert words[0] == "no rank were slower than most"
    assert {"no rank waited for data", "the links were twice as fast"} & set(words) == {"no rank waited for data"}
    assert [one.gain for one in found] == sorted((one.gain for one in found), reverse=True)
    before_s = times(job).iteration_s
    for one in found:
        assert one.gain == pytest.approx(1 - one.times.iteration_s / before_s)


def test_a_compiled_model_in_parts_is_one_with_the_line_that_does_it() -> None:
    job = compiled_job(LinkModel(alpha_s=1e-3, throughput=(2e7, 4e7), host_s=0.0))
    (one,) = (one for one in remedies(job, before_s=times(job).iteration_s) if "early_gradients" in one.words)
    assert one.words.startswith("the model was compiled in ")
    assert one.gain > 0.1
    assert one.is_priced
    for other in (on_one_host(), compiled_job(LinkModel(alpha_s=1e-4, throughput=(2e9,), host_s=0.0))):
        answers = single_remedies(other, before_s=times(other).iteration_s)
        assert not [one for one in answers if "early_gradients" in one.words]


def test_each_knob_is_asked_for_by_itself_and_both_together() -> None:
    job = over_a_link(streams=1)
    (buffer,) = job.buffers
    knobs = Knobs(unit_bytes=8000, streams=1, transport=TransportKind.GLOO)
    plan = knobs.to_plan(buffer.layout)
    job = with_plans(replace(job, buffers=(replace(buffer, knobs=knobs),)), {0: plan})
    before_s = times(job).iteration_s
    words = [one.words for one in single_remedies(job, before_s=before_s)]
    assert [word for word in words if word.startswith("there were")] in (
        [f"there were {count} streams"] for count in (2, 4, 8)
    )
    assert "units were of 1 MiB" in words
    assert not any("otherwise" in word for word in words)  # one unit of 1 MiB is all there is, on any stream


def test_where_units_are_not_of_one_size_there_is_another_plan_only() -> None:
    words = [one.words for one in single_remedies(over_a_link(), before_s=1.0)]
    assert [word for word in words if "units" in word or "streams" in word] == [
        "units were cut otherwise (gloo flat, 1 MiB units, 1 stream)"
    ]


def test_no_other_plan_is_asked_for_where_a_rank_had_no_gradients() -> None:
    job = over_a_link()
    assert unanswered(job) == ()
    last = job.iterations[-1]
    idle = tuple(replace(piece, ready=()) for piece in last.programs[1])
    job = replace(job, iterations=(job.iterations[0], replace(last, programs={**last.programs, 1: idle})))
    (sentence,) = unanswered(job)
    assert "a rank had no gradients of its own" in sentence
    words = [one.words for one in single_remedies(job, before_s=1.0)]
    assert words
    assert not any("units" in one for one in words)


def test_prices_that_fit_the_recorded_units_are_right_and_others_are_said() -> None:
    job = over_a_link()
    before_s = times(job).iteration_s
    assert price_error(job, before_s=before_s) == pytest.approx(0.0, abs=1e-3)
    assert price_notes(price_error(job, before_s=before_s)) == ()
    error = price_error(job, before_s=0.5 * before_s)
    assert error == pytest.approx(1.0, abs=2e-3)
    (sentence,) = price_notes(error)
    assert "99.9 % longer than it was" in sentence
    assert "10.0 % shorter" in price_notes(-0.1)[0]
    assert price_error(replace(job, buffers=()), before_s=before_s) == 0.0


def test_answers_with_other_units_say_so() -> None:
    asked = single_remedies(over_a_link(), before_s=1.0)
    assert {one.is_priced for one in asked if "units" in one.words} == {True}
    assert not any(one.is_priced for one in asked if "units" not in one.words)


def test_what_brings_nothing_is_asked_and_not_said() -> None:
    job = over_a_link()
    before_s = times(job).iteration_s
    asked = single_remedies(job, before_s=before_s)
    assert [one for one in asked if one.is_worth_saying] == list(remedies(job, before_s=before_s))
    assert len(asked) > len(remedies(job, before_s=before_s))


def test_a_job_on_one_host_has_no_link_to_make_faster() -> None:
    job = on_one_host()
    assert not any("links" in one.words for one in remedies(job, before_s=times(job).iteration_s))


def test_the_best_knobs_are_the_fastest_of_a_few() -> None:
    found = best_knobs(over_a_link(cuts=(1, 2, 3, 4), streams=1))
    assert found is not None
    assert found.transport is TransportKind.GLOO


def test_a_job_without_gradients_has_no_plan_to_change() -> None:
    bare = replace(over_a_link(), buffers=())
    assert best_knobs(bare) is None
    with pytest.raises(ReplayError, match="no gradients were exchanged"):
        knobs_of(bare, streams=2)


def test_knobs_change_as_they_are_told() -> None:
    job = over_a_link()
    assert knobs_of(job, streams=7).streams == 7
    assert knobs_of(job, unit_bytes=4096).unit_bytes == 4096
    assert knobs_of(job, transport=TransportKind.MPI).transport is TransportKind.MPI
