import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from fakes.trial_logs import JOB, MODEL, PLANNING, knobs, predicted, svgs, trial

from sirtaki.analysis.svg import nice_ticks
from sirtaki.autotune.knobs import Cut
from sirtaki.cli.__main__ import main
from sirtaki.cli.report import render, write_report
from sirtaki.comm.plan import TransportKind
from sirtaki.engine.tuning.trial_log import read_log
from sirtaki.errors import ConfigError


def test_every_measurement_is_a_mark_with_its_setting(log_of):
    first, *_ = svgs(render(read_log(log_of(*JOB))))
    titles = [element.text for element in first.iter() if element.tag.endswith("title")]
    assert len(titles) == 4
    assert titles[1] == "100 ms: grid, gloo flat, 512 KiB units, 4 streams"
    assert titles[3].startswith("failed: ")


def test_the_page_needs_no_other_file_and_runs_nothing(log_of):
    page = render(read_log(log_of(MODEL, *JOB)))
    assert "<script" not in page
    assert not re.search(r'(src|href)="', page)


def test_names_from_the_log_are_shown_and_not_obeyed(log_of):
    page = render(read_log(log_of(*JOB)))
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "<b>bold" not in page


def test_tags_are_closed_and_the_plots_are_well_formed(log_of):
    class Balance(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attrs):
            if tag != "meta":
                self.open.append(tag)

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    page = render(read_log(log_of(*JOB)))
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert len(svgs(page)) == 3


def test_with_the_jobs_model_the_default_and_the_winner_are_drawn_as_timelines(log_of):
    planned = knobs(512, 2, cuts=(Cut(stop=100_000), Cut(stop=300_000, stream=1)))
    records = [MODEL, JOB[0], trial(6, "mg_wfbp", planned, 0.1, 0.1)]
    plots = svgs(render(read_log(log_of(*records))))
    assert len(plots) == 5
    boxes = [element for element in plots[4].iter() if element.tag.endswith("rect")]
    assert len(boxes) == 1 + 2  # the backward pass and two units


def test_the_terminal_shows_what_the_page_says(log_of, tmp_path, capsys):
    log = log_of(predicted(JOB[0], 0.21), predicted(JOB[1], 0.05), *JOB[2:])
    assert main(["report", str(log), "-o", str(tmp_path / "page.html")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Kept: gloo flat, 512 KiB units, 4 streams, proposed by grid." in said
    assert "100 ms 50 ms gloo flat, 512 KiB units, 4 streams grid 6" in said
    assert "predicted to be faster in 90 % of the cases" in said
    assert "how many of them were the best so far: grid 1 (1), pbt 1 (0), <b>bold</b> 1 (0)." in said
    assert said.endswith("page.html")


def test_with_the_jobs_model_the_bound_is_drawn_and_told(log_of):
    assert PLANNING.bound_s == pytest.approx(0.02)  # from the first ready gradient to the last
    page = render(read_log(log_of(MODEL, *JOB)))
    assert "No plan can take less than 20 ms" in page
    first = svgs(page)[0]
    dashed = [element for element in first.iter() if element.get("stroke-dasharray")]
    assert len(dashed) == 2  # default and bound
    assert len([e for e in svgs(render(read_log(log_of(*JOB))))[0].iter() if e.get("stroke-dasharray")]) == 1


def test_no_setting_is_shown_below_the_bound(log_of):
    slow = {**MODEL, "links": [{**link, "link": {**link["link"], "throughput": [1e6]}} for link in MODEL["links"]]}
    log = read_log(log_of(slow, *JOB))
    assert log.model.bound_s > log.fastest_s  # the probes were too pessimistic
    assert log.bound_s == log.fastest_s
    page = render(log)
    assert "No plan can take less" not in page
    assert "the bound is drawn at the fastest setting, 100 ms" in page


def test_default_and_winner_stand_side_by_side(log_of):
    page = render(read_log(log_of(MODEL, *JOB)))
    assert page.count('<div class="pair"><div>') == 1
    assert page.index("untuned default:") < page.index("kept:")


def test_a_setting_of_a_route_that_was_not_measured_has_no_timeline(log_of):
    elsewhere = replace(knobs(), transport=TransportKind.MPI)
    page = render(read_log(log_of(MODEL, JOB[0], trial(6, "grid", elsewhere, 0.1, 0.1))))
    assert len(svgs(page)) == 3
    assert "No timeline: that job's probes did not show what mpi flat" in page


def test_a_missing_log_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        write_report(tmp_path / "nowhere", tmp_path / "page.html")


def test_the_page_is_written(log_of, tmp_path):
    write_report(log_of(*JOB), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 97.3), (0, 1e-4), (3, 3), (0, 100)])
def test_ticks_are_few_round_and_inside(low, high):
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 7
    assert all(low <= tick <= high + 1e-9 for tick in ticks)
