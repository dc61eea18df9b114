"""What the dPRO paper says (MLSys 2022, section 7), and rows that put beside it what was found here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .harness import RESULTS

PAPER: Mapping[str, tuple[str, str, str, str]] = {
    "iteration": ("fig. 7", "iteration: error", "< 5 % mostly", "RDMA, 100 Gbit/s, GPUs"),
    "rule": ("fig. 7", "iteration by Daydream's rule: error", "up to 70.2 %", "as above"),
    "forward": ("table 2", "forward pass: error", "0.8, 1.7 %", "BERT and ResNet on GPUs"),
    "backward": ("table 2", "backward pass: error", "0.7, 1.4 %", "as above"),
    "plan": ("", "another plan, as a ratio to the one that ran: error", "not told", ""),
    "overhead": ("sec. 7.2", "recording: overhead", "5.86 %", "GPUs, whose kernels run on"),
    "apart": ("fig. 8", "iteration, clocks not aligned: error", "up to 36.7 %", "clocks of several machines"),
    "aligned": ("fig. 8", "iteration, clocks aligned: error", "< 5 %", "as above"),
    "clock": ("sec. 4.2", "what is left of a wrong clock", "not told", "as above"),
    "operators": ("fig. 9", "operators fused for communication: step", "1 / 1.52 of XLA's", "XLA, GPUs"),
    "tensors": ("fig. 9", "tensors fused and cut: step", "1 / 1.19 of the default's", "Horovod, BytePS, GPUs"),
    "peak": ("table 3", "peak memory: error", "at most 5.25 %", "memory of GPUs"),
    "remedies": ("table 4", "time with re-computation, accumulation: error", "3.4, 0.8 %", "BERT on 16 GPUs"),
    "strawman": ("table 5", "search without accelerations", "14.6 h (ResNet50)", "operators are not fused in it"),
    "+ coarsening": ("table 5", "with the coarsened view", "5.35 h", "as above"),
    "+ partial replay": ("table 5", "with partial replay, too", "0.91 h", "as above"),
    "+ symmetry": ("table 5", "with symmetry, too", "0.29 h", "as above"),
    "crowd": ("fig. 10", "more ranks: error", "< 5.6 %; Daydream up to 73.8 %", "128 GPUs on 16 hosts"),
    "question": ("", "one question to 64 ranks", "not told", ""),
    "questions": ("", "further ones, about other units", "not told", ""),
}
"""Figure, what it shows, the paper's value, and what of it cannot be had on one machine without GPUs."""

KEPT = {
    "operators": ("compiled", "÷ whole"),
    "tensors": ("optimize", "chosen"),
    "peak": ("memory", "peak off by"),
    "remedies": ("memory", "time off by"),
}
"""The benchmark that has measured it, and a word that is in the claims of its bars."""


MOST = 3
"""Bars that are quoted one by one."""


def line(key: str, here: str, how: str) -> dict[str, Any]:
    """A row of the table: what was found of one of `PAPER`, and how."""
    figure, what, paper, missing = PAPER[key]
    return {"figure": figure, "what": what, "the paper": paper, "here": here, "how": how, "not redone": missing}


def kept_lines(results: Path = RESULTS) -> Iterator[dict[str, Any]]:
    """Rows of what other benchmarks have kept."""
    for key, (name, word) in KEPT.items():
        path = results / f"{name}.md"
        bars = kept_bars(path.read_text(encoding="utf-8")) if path.exists() else {}
        said = [f"{claim}: {value}" for claim, value in bars.items() if word in claim]
        if len(said) > MOST:
            worst = max((claim for claim in bars if word in claim), key=lambda claim: float(bars[claim].split()[0]))
            said = [f"of {len(said)} at worst {worst}: {bars[worst]}"]
        yield line(key, "; ".join(said) or "not kept yet", f"bench.{name}")


def kept_bars(page: str) -> dict[str, str]:
    """What a page of kept results says of each bar: by its claim, what was measured."""
    rows = re.findall(r"^\| (.+) \| (.+) \| ≤ .+ \| (?:met|\*\*missed\*\*) \|$", page, re.MULTILINE)
    return dict(rows)
