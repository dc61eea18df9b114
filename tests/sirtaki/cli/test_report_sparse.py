import re

import pytest
from fakes.trial_logs import JOB, TABLE, svgs

from sirtaki.cli.__main__ import main
from sirtaki.cli.report import render
from sirtaki.engine.tuning.trial_log import read_log

OF = {"version": 2, "tuner": "a", "process": "p"}
HOT_COLD = "hot_cold (300 hot rows, the others by owner)"
HOT = {
    **TABLE,
    "name": "<b>hot</b>",
    "plan": HOT_COLD,
    "ways": [{"plan": HOT_COLD, "predicted_s": None, "measured_s": None, "n_bytes": 1e6}],
}


@pytest.fixture
def log_with(log_of):
    return lambda *records: log_of(*({**record, **OF} for record in records))


def cells(page):
    table = page[page.index("<h2>Sparse gradients</h2>") :]
    rows = re.findall(r"<tr>(.*?)</tr>", table[: table.index("</table>")])
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", row)] for row in rows[1:]]


def test_a_line_of_the_table_says_what_was_touched_which_way_was_taken_and_what_that_saves(log_with):
    page = render(read_log(log_with(*JOB, TABLE)))
    assert cells(page) == [
        [
            "table",
            "200000 × 64",
            "4.50%",
            "300: 40%",
            "gather",
            "gather 60 ms, 2.34 (predicted 50 ms); owner 70 ms, 2.5 (predicted 40 ms)",
            "2.34",
            "76.8",
            "6.49",
        ]
    ]
    assert "a rank receives 2.34 MB in an iteration; dense it would be 76.8 MB (33 times as much)" in page
    assert "by Horovod&#x27;s rule 6.49 MB (2.8 times as much)" in page


def test_what_was_not_tried_and_where_nothing_was_counted_stays_empty(log_with):
    fixed = {**HOT, "curve": [], "popular_rows": 0}
    page = render(read_log(log_with(*JOB, fixed)))
    assert cells(page)[0][3:6] == ["", HOT_COLD, ""]
    assert len(svgs(page)) == len(svgs(render(read_log(log_with(*JOB)))))


def test_each_parameter_is_a_curve_with_a_dot_at_its_popular_rows(log_with):
    page = render(read_log(log_with(*JOB, TABLE, HOT)))
    curves = svgs(page)[-1]
    assert sum(element.tag.endswith("polyline") for element in curves.iter()) == 2
    titles = [element.text for element in curves.iter() if element.tag.endswith("title")]
    assert titles == ["table: 300 rows are 40% of touches", "<b>hot</b>: 300 rows are 40% of touches"]
    assert "<b>hot" not in page


def test_without_sparse_gradients_nothing_is_said_of_them(log_with):
    assert "Sparse gradients" not in render(read_log(log_with(*JOB)))


def test_the_terminal_says_it_too_also_where_all_gradients_are_sparse(log_with, capsys):
    for records in ([*JOB, TABLE], [TABLE]):
        assert main(["report", str(log_with(*records))]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "Sparse gradients: a rank receives 2.34 MB" in said
        assert "table (200000 × 64): 4.50% of rows in an iteration, 300 of them are 40% of touches; by gather" in said
    assert said.startswith("No settings were tried: this optimizer's gradients are all sparse.")
