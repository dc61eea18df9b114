"""Each measured figure in the README and the guides stands in a kept result that its section names."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "should-i-use-it.md",
    ROOT / "docs" / "explanation" / "measured.md",
    ROOT / "docs" / "explanation" / "sharded.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]

SECONDS = {"µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0}
NUMBER = r"(?<![\w.,:/^≥-])\d+(?:\.\d+)?(?!\w|[.,]\d| [KMGT])"
FIGURES = re.compile(rf"({NUMBER})((?:(?:,| /| and|,? to|–| \(|,? or)\s*{NUMBER})*)(?:\)?\s?(ms|µs|us|%|×|s)(?!\w))?")
MEASURED = re.compile(r"\b(took|passed|measured|was ready|÷)\b")
NAMES = re.compile(r"(PyTorch|Python|Ray|Kubernetes|Accelerate|Slurm|Zipf|exponent)( \d[\d., and]*)? $")

NOT_MEASURED = {
    "compiled.md": {"2 %"},  # what a plan must gain
    "measured.md": {
        "2 %",
        "4 %",
        "0.95",
        "0.77",
        "0.32",
        "0.81",
        "0.08 %",
        "0.13 %",
        "1 %",
    },  # what parts may cost, noise put in, bench.sweep --list; of an aggregator, the paper's, and losses asked for
    "embeddings.md": {"1 %"},  # what more rows must cover
    "gpus.md": {"5 %"},  # what one of NCCL's ways must gain alone
    "profile.md": {"5 %"},  # how far off a replay may be
    "report.md": {"95 %"},  # how to read a line of the log
}
"""Figures of a page that resemble measurements and are none."""

Figure = tuple[float, str]
"""A value, and its unit: s, % or none."""


def sections(text: str) -> Iterator[str]:
    """Yield the text between headings, without code blocks and comments."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE):
        lines, listed = [], False
        for line in section.splitlines():
            listed = bool(re.match(r"[-*]|\d+\.", line)) or (listed and (line.startswith(" ") or not line))
            if listed or not line.startswith("    "):
                lines.append(line)
        yield "\n".join(lines)


def sources(section: str) -> set[Path]:
    """Return the results, and pictures of results, that a section names, by file or by command."""
    stems = re.findall(r"bench/results/(\w+)\.md", section) + re.findall(r"python\s+-m\s+bench\.(\w+)", section)
    pictures = [ROOT / "docs" / "pictures" / f"{name}.svg" for name in re.findall(r"pictures/(\w+)\.svg", section)]
    return {path for path in [*pictures, *(RESULTS / f"{stem}.md" for stem in stems)] if path.exists()}


def claims(section: str) -> Iterator[str]:
    """Each figure of the prose that looks measured, with its unit.

    A sentence that says "not kept" is left out. Whole seconds, and what has neither point nor unit, are limits and
    counts; figures without a unit may be versions where nothing was measured.
    """
    sourced = bool(sources(section))
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", " ` ", section)
    for sentence in re.split(r"(?<=[.;]) |\n(?=[-|])|\n\n", prose):
        if "not kept" in sentence.lower():
            continue
        says = sourced or MEASURED.search(sentence)
        for found in FIGURES.finditer(" ".join(sentence.split())):
            unit = found[3] or ""
            for number in [found[1], *re.findall(r"\d+(?:\.\d+)?", found[2])]:
                named = NAMES.search(found.string[: found.start()])
                if (says and "." in number and not named) if unit in ("", "s") else True:
                    yield f"{number} {unit}".strip()
                elif unit == "s" and MEASURED.search(sentence):
                    yield f"{number} s"


@cache
def kept(path: Path) -> list[Figure]:
    """All figures of a result, by the units that stand behind them, at the head of their column, or in their row."""
    text, found = path.read_text(), []
    if path.suffix == ".svg":
        text = "\n".join(re.findall(r">([^<]+)</", text))
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        found += [(float(value), "s") for value in re.findall(r"\w_s (\d+(?:\.\d+)?)\b", line)]  # settings
        row = next((cell for cell in cells if cell in SECONDS or cell == "%"), "")
        for number, cell in enumerate(cells):
            column = re.search(r"[ ,](ms|µs|us|s|%)$", head[number]) if number < len(head) else None
            for value, unit in re.findall(r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)(?: (ms|µs|us|%|s)\b)?", cell):
                unit = unit or (column[1] if column else row)
                found.append((float(value) * SECONDS.get(unit, 1.0), "s" if unit in SECONDS else unit))
    return found


def stands_in(claim: str, figures: list[Figure]) -> bool:
    """Return whether a figure equals one of these after rounding; a share may be given as its complement."""
    number, _, unit = claim.partition(" ")
    value, digits = float(number), len(number.partition(".")[2])
    for kept_value, kept_unit in figures:
        shown: list[float] = []
        if unit in SECONDS and kept_unit == "s":
            shown = [kept_value / SECONDS[unit]]
        elif unit == "%":
            shown = (
                [kept_value] if kept_unit == "%" else [100 * kept_value, abs(100 * (1 - kept_value))] * (not kept_unit)
            )
        elif unit in ("", "×"):
            shown = [kept_value] * (not kept_unit)
        if any(abs(candidate - value) <= 0.5001 * 10**-digits for candidate in shown):
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_measured_figure_is_in_a_kept_result(page: Path) -> None:
    unfounded = []
    for section in sections(page.read_text()):
        figures = [figure for path in sources(section) for figure in kept(path)]
        unknown = (claim for claim in claims(section) if claim not in NOT_MEASURED.get(page.name, ()))
        title = section.partition("\n")[0]
        unfounded += [(title, claim) for claim in unknown if not stands_in(claim, figures)]
    assert unfounded == [], "name the kept result in the section, or leave the figure out"


@pytest.mark.parametrize(
    ("sentence", "unfounded"),
    [
        ("A step took 0.77 of DDP's, 109 ms (`bench/results/step.md`).", []),
        ("A step took 0.71 of DDP's, 171 ms (`bench/results/step.md`).", ["0.71"]),  # tuned took 171 ms
        ("A step took 0.77 of DDP's, 161 ms.", ["0.77", "161 ms"]),
        ("Shared memory took 23 to 38 % off (`bench/results/step.md`).", []),
        ("Shared memory took 23 to 70 % off (`bench/results/step.md`).", ["70 %"]),
        ("63 s passed in one try.", ["63 s"]),
        ("It waits 30 s with PyTorch 2.13.", []),
    ],
)
def test_a_figure_without_a_result_is_noticed(sentence: str, unfounded: list[str]) -> None:
    figures = [figure for path in sources(sentence) for figure in kept(path)]
    assert [claim for claim in claims(sentence) if not stands_in(claim, figures)] == unfounded
