"""Draw the documents' pictures of benchmark results: bench/results/NAME.md → docs/pictures/NAME.svg.

    python docs/pictures.py            # draw the outdated pictures
    python docs/pictures.py --check    # print the names of outdated pictures; exit code 1 if there are any

The metadata of a picture contain its numbers as JSON. The check compares these with the result, without matplotlib.
"""

import argparse
import html
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "bench" / "results"
INK, COLORS = "#444444", ("#8c959f", "#0072b2", "#d55e00")
DARK = f"""<style>@media (prefers-color-scheme: dark) {{
text {{ fill: #c8ccd0 !important; }} [style*="stroke: {INK}"] {{ stroke: #9da7b3 !important; }} }}</style>"""

Numbers = list[list[Any]]


def overlap() -> Numbers:
    """Return rows of case, network, contender, and step time with its confidence interval in ms."""
    rows = [row for row in _rows("overlap") if len(row) == 7 and row[2] in ("ddp", "off", "on")]
    return [[*row[:3], *map(float, re.findall(r"[\d.]+", row[3]))] for row in rows]


def draw_overlap(figure: Any, numbers: Numbers) -> None:
    """Draw one panel for each case, with three bars for each model."""
    titles = {"equal": "link and flow 200 Mbit/s", "capped": "link 400 Mbit/s, a flow at most 100"}
    names = {"ddp": "PyTorch DDP", "off": "Sirtaki, tuned", "on": "with overlap_forward"}
    for axes, (case, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        rows = [row[1:] for row in numbers if row[0] == case]
        models = list(dict.fromkeys(row[0] for row in rows))
        for place, (contender, label) in enumerate(names.items()):
            spans = [row[2:] for row in rows if row[1] == contender]
            _bars(axes, place - 1, 0.27, spans, label, COLORS[place])
        axes.set_xticks(range(len(models)), models)
        axes.set_title(title)
    figure.axes[0].set_ylabel("step, ms")
    figure.axes[1].legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0.98), labelcolor=INK)
    figure.axes[1].set_ylim(0, 1300)


def elastic() -> Numbers:
    """Return rows of ranks, recovery time with its interval, worst recovery, and join time with its interval, in ms."""
    rows = [row for row in _rows("elastic") if row[0] == "sirtaki"]
    return [
        [float(row[1]), *(float(figure) for cell in row[3:6] for figure in re.findall(r"[\d.]+", cell))] for row in rows
    ]


def draw_elastic(figure: Any, numbers: Numbers) -> None:
    """Draw bars of recovery and join time, and a mark of the worst recovery, for each number of ranks."""
    axes = figure.subplots()
    bars = ("recovery, median", [row[1:4] for row in numbers]), ("join, median", [row[5:8] for row in numbers])
    for place, (label, spans) in enumerate(bars):
        _bars(axes, place - 0.5, 0.35, spans, label, COLORS[place + 1])
    axes.plot([n - 0.175 for n in range(len(numbers))], [row[4] for row in numbers], "_", color=COLORS[0], ms=24, mew=2,
              label="worst recovery")  # fmt: skip
    axes.set_xticks(range(len(numbers)), [f"{row[0]:.0f} ranks" for row in numbers])
    axes.set_ylabel("ms")
    axes.legend(frameon=False, loc="upper left", labelcolor=INK)


def sharded() -> Numbers:
    """Return rows of contender, and step time with its interval in ms."""
    rows = [row for row in _rows("fsdp_host") if row[0] == "host"]
    return [[row[1], *map(float, re.findall(r"[\d.]+", row[2]))] for row in rows]


def draw_sharded(figure: Any, numbers: Numbers) -> None:
    """Draw one bar for each contender."""
    axes = figure.subplots()
    names = {"gloo": "FSDP2 over Gloo", "by hand, kept": "prefetched by hand,\nparameters kept"}
    names |= {"untuned": "attached,\nuntuned", "tuned": "attached,\ntuned"}
    for number, row in enumerate(numbers):
        ours = row[0] in ("untuned", "tuned")
        errors = [[row[1] - row[2]], [row[3] - row[1]]]
        axes.bar(number, row[1], 0.6, yerr=errors, color=COLORS[int(ours)], ecolor=INK, capsize=3)
    axes.set_xticks(range(len(numbers)), [names[row[0]] for row in numbers])
    axes.set_ylabel("step, ms")


def convergence() -> Numbers:
    """Return rows of task, way of reducing, and loss with its lowest and highest value over the seeds."""
    rows = [row for row in _rows("convergence") if len(row) == 6 and row[0] in ("digits", "characters", "recommender")]
    return [[*row[:2], *map(float, row[2:5])] for row in rows]


def draw_convergence(figure: Any, numbers: Numbers) -> None:
    """Draw one panel for each task: loss and range over seeds of each way, and a line at the loss of plain sums."""
    ways = list(dict.fromkeys(row[1] for row in numbers))[::-1]
    tasks = list(dict.fromkeys(row[0] for row in numbers))
    for number, (axes, task) in enumerate(zip(figure.subplots(1, len(tasks), sharey=True), tasks, strict=True)):
        for _, way, loss, low, high in (row for row in numbers if row[0] == task):
            color = COLORS[0 if way == "plain" else 2 if "sgd 8" in way or "diloco" in way else 1]
            axes.plot([low, high], [ways.index(way)] * 2, color=color, lw=3, alpha=0.4)
            axes.plot(loss, ways.index(way), "o", color=color)
            if way == "plain":
                axes.axvline(loss, color=COLORS[0], lw=1, ls=":")
        axes.set_title(task)
        axes.set_xlabel("loss at the end")
        if not number:
            axes.set_yticks(range(len(ways)), ways)


def _bars(axes: Any, place: float, width: float, spans: Numbers, label: str, color: str) -> None:
    """Draw one bar for each row of value, lower end and upper end of the error bar."""
    errors = [[row[0] - row[1] for row in spans], [row[2] - row[0] for row in spans]]
    at = [number + place * width for number in range(len(spans))]
    axes.bar(at, [row[0] for row in spans], width, yerr=errors, label=label, color=color, ecolor=INK, capsize=2)


PICTURES: Mapping[str, tuple[Callable[[], Numbers], Callable[[Any, Numbers], None], float]] = {
    "overlap": (overlap, draw_overlap, 8.4),
    "elastic": (elastic, draw_elastic, 5.2),
    "sharded": (sharded, draw_sharded, 6.4),
    "convergence": (convergence, draw_convergence, 8.4),
}
"""Name → function that returns the numbers, function that draws them, and width in inches."""


def _rows(name: str) -> Iterator[list[str]]:
    """Yield the cells of each table row in a kept result."""
    for line in (RESULTS / f"{name}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def outdated() -> Iterator[str]:
    """Yield the names of pictures that do not exist or do not show the numbers of the kept result."""
    for name, (numbers, _, _) in PICTURES.items():
        path = DOCS / "pictures" / f"{name}.svg"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        shown = re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
        if shown is None or json.loads(html.unescape(shown[1])) != numbers():
            yield name


def draw(name: str) -> None:
    """Write one picture, readable on light and dark pages."""
    import matplotlib
    from matplotlib.figure import Figure

    numbers, picture, width = PICTURES[name]
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    fixed = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10, "font.family": "sans-serif"}
    plain = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10}
    path = DOCS / "pictures" / f"{name}.svg"
    with matplotlib.rc_context({**ink, **fixed, **plain}):
        figure = Figure(figsize=(width, 3.2), layout="constrained")
        picture(figure, numbers())
        metadata = {"Title": name, "Description": json.dumps(numbers()), "Date": None, "Creator": None}
        figure.savefig(path, transparent=True, metadata=metadata)
    text = "\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text(text.replace("<metadata>", f"{DARK}\n<metadata>", 1) + "\n", encoding="utf-8")


def main() -> int:
    """Draw the outdated pictures; with `--check`, print their names only."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a picture is out of date")
    check, names = parser.parse_args().check, list(outdated())
    if not check:
        for name in names:
            draw(name)
    if names:
        print(f"{'out of date, run `python docs/pictures.py`' if check else 'drawn'}: {', '.join(names)}")
    return int(check and bool(names))


if __name__ == "__main__":
    sys.exit(main())
