"""Shapes lie where their values are, whatever the values, and what users named is text and nothing else."""

import math
import re
from xml.etree import ElementTree

import pytest

from sirtaki.analysis.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Plot,
    framed,
    legend,
    log_ms,
    log_ms_ticks,
    nice_ticks,
    page,
    swatch,
)

NASTY = '<b>&"quoted"</b>'


def plot(x: tuple[float, float] = (0.0, 10.0), y: tuple[float, float] = (0.0, 1.0), **more: int) -> Plot:
    return Plot(x=x, y=y, x_label="across", y_label="up", **more)


def shapes(drawn: Plot, tag: str) -> list[dict[str, str]]:
    root = ElementTree.fromstring(drawn.render())
    return [found.attrib for found in root.iter() if found.tag.endswith(f"}}{tag}")]


def points(drawn: Plot) -> list[tuple[float, float]]:
    (line,) = shapes(drawn, "polyline")
    return [tuple(map(float, pair.split(","))) for pair in line["points"].split()]  # type: ignore[misc]


def test_corners_of_the_axes_are_corners_of_the_plot() -> None:
    drawn = plot()
    drawn.line([(0.0, 0.0), (10.0, 1.0), (5.0, 0.5)], color="red")
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    assert points(drawn) == [(LEFT, floor), (right, TOP), ((LEFT + right) / 2, (TOP + floor) / 2)]


def test_a_plot_of_another_size_is_scaled() -> None:
    drawn = plot(height=200, width=400)
    drawn.line([(10.0, 0.0)], color="red")
    assert points(drawn) == [(400 - RIGHT, 200 - BOTTOM)]
    assert 'viewBox="0 0 400 200"' in drawn.render()


def test_axes_without_extent_are_drawn_all_the_same() -> None:
    drawn = plot(x=(3.0, 3.0), y=(2.0, 2.0))
    drawn.line([(3.0, 2.0)], color="red")
    assert points(drawn) == [(LEFT, HEIGHT - BOTTOM)]


def test_a_dashed_line_is_dashed() -> None:
    for dashed in (False, True):
        drawn = plot()
        drawn.line([(0.0, 0.0)], color="red", dashed=dashed)
        assert ("stroke-dasharray" in shapes(drawn, "polyline")[0]) == dashed


def test_steps_keep_each_value_until_the_next_and_the_last_to_the_edge() -> None:
    drawn = plot()
    drawn.steps([(2.0, 0.0), (4.0, 1.0)], color="red")
    floor, unit = HEIGHT - BOTTOM, (WIDTH - LEFT - RIGHT) / 10
    expected = [(2, floor), (4, floor), (4, TOP), (10, TOP)]
    assert points(drawn) == [(pytest.approx(LEFT + x * unit, abs=0.05), y) for x, y in expected]
    empty = plot()
    empty.steps([], color="red")
    assert points(empty) == []


def test_points_crosses_and_boxes_have_tooltips() -> None:
    drawn = plot()
    drawn.dot(5.0, 0.5, color="red", title=NASTY)
    drawn.dot(5.0, 0.5, color="red", title="", large=True)
    drawn.cross(5.0, color="blue", title="failed")
    drawn.box((0.0, 10.0), (0.0, 1.0), color="green", title="whole", opacity=0.25)
    small, large = shapes(drawn, "circle")
    assert float(large["r"]) > float(small["r"])
    (box,) = shapes(drawn, "rect")
    assert [float(box[name]) for name in ("x", "y", "width", "height")] == [
        LEFT,
        TOP,
        WIDTH - LEFT - RIGHT,
        HEIGHT - BOTTOM - TOP,
    ]
    assert box["fill-opacity"] == "0.25"
    titles = [found.text for found in ElementTree.fromstring(drawn.render()).iter() if found.tag.endswith("}title")]
    assert titles == [NASTY, None, "failed", "whole"]
    (cross,) = shapes(drawn, "path")
    assert cross["d"].startswith(f"M{LEFT + (WIDTH - LEFT - RIGHT) / 2 - 4:.1f} {TOP + 2}")


def test_a_box_that_lasts_no_time_can_be_seen() -> None:
    drawn = plot()
    drawn.box((5.0, 5.0), (0.2, 0.4), color="green")
    assert float(shapes(drawn, "rect")[0]["width"]) == 0.6


def test_axes_have_labels_and_ticks_or_those_that_are_given() -> None:
    def texts(drawn: str) -> list[str | None]:
        return [found.text for found in ElementTree.fromstring(drawn).iter() if found.tag.endswith("}text")]

    drawn = Plot(x=(0.0, 10.0), y=(0.0, 1.0), x_label=NASTY, y_label="up")
    usual = texts(drawn.render())
    assert usual[-2:] == [NASTY, "up"]
    assert usual[:-2] == ["0", "2", "4", "6", "8", "10", "0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert texts(drawn.render(x_ticks=[(5.0, "half")], y_ticks=[])) == ["half", NASTY, "up"]
    assert texts(drawn.render(x_ticks=[], y_ticks=[])) == [NASTY, "up"]
    assert drawn.render(y_ticks=[]).count('class="grid"') == 0


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 6.0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        (-1.0, 1.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (0.13, 0.17, [0.13, 0.14, 0.15, 0.16, 0.17]),
        (3.0, 3.0, [3.0]),
        (4.0, 3.0, [4.0]),
    ],
)
def test_ticks_are_round_and_within(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == ticks


@pytest.mark.parametrize("magnitude", [1e-9, 1e-3, 1.0, 1e6])
def test_there_are_a_few_ticks_at_any_magnitude(magnitude: float) -> None:
    for width in (1.0, 1.3, 2.7, 5.1, 9.9):
        assert 2 <= len(nice_ticks(0.0, width * magnitude)) <= 7


def test_times_on_a_logarithmic_axis_are_in_milliseconds() -> None:
    assert log_ms(0.1) == pytest.approx(2.0)
    near = log_ms_ticks(math.log10(2.0), math.log10(20.0))
    assert [label for _, label in near] == ["2", "3", "5", "7", "10", "15", "20"]
    assert all(place == pytest.approx(math.log10(float(label))) for place, label in near)
    assert [label for _, label in log_ms_ticks(0.0, 3.0)] == ["1", "3", "10", "30", "100", "300", "1000"]
    assert log_ms_ticks(0.35, 0.4) == []


def test_a_page_is_one_document_and_its_title_is_text() -> None:
    made = page(f"A {NASTY}", ["<p>one</p>", "<p>two</p>"])
    assert made.startswith("<!doctype html>")
    assert NASTY not in made
    assert "<title>Sirtaki: a &lt;b&gt;" in made
    assert made.index("<p>one</p>") < made.index("<p>two</p>")
    body = re.search(r"<body>.*</body>", made, flags=re.DOTALL)
    assert body is not None
    assert (ElementTree.fromstring(body[0]).find("h1") or [None]) is not None
    assert not re.search(r"https?://(?!www\.w3\.org)", made)  # nothing is fetched


def test_a_legend_names_each_colour_once() -> None:
    made = legend({NASTY: "#111111", "grid": "#222222"})
    entries = ElementTree.fromstring(made).findall("span")
    assert ["".join(entry.itertext()) for entry in entries] == [NASTY, "grid"]
    assert swatch("#222222") in made
    assert ElementTree.fromstring(framed("<svg/>")).get("class") == "plot"
