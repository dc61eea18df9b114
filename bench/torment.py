"""Drawn training programs on ranks against one process: how many were played, and how many went wrong.

    python -m bench.torment --programs 20000 --save

Programs are those of `tests/torment`: whatever a script may do between two steps. Each is played on 1 to 4 ranks of
this host and in one process in float64, and all that a script may look at is compared after each step. A program that
goes wrong is made as small as Hypothesis can and kept as JSON (`--keep`), as the tests replay it.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from bench.lib.harness import REPOSITORY, Bar, Report, finish, parser

sys.path.insert(0, str(REPOSITORY / "tests"))

from torment.program import Program
from torment.ranks import Ranks
from torment.strategy import environments_of, programs
from torment.tormentor import WrongError, torment

SHARES = {1: 0.04, 2: 0.3, 3: 0.36, 4: 0.3}
"""Of the programs, by world size."""

CHUNK = 50
"""Programs drawn from one seed, in one environment."""


class Tally:
    """What has been played on one world size in one environment."""

    def __init__(self, keep: Path | None) -> None:
        self._keep = keep
        self.programs = self.wrong = 0
        self.actions: Counter[str] = Counter()

    def chunk(self, ranks: Ranks, world: int, environment: dict[str, str], count: int, number: int) -> None:
        """Draws and plays `count` programs; a wrong one ends the chunk, after it has been made small."""
        smallest: list[WrongError] = []

        @seed(number)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(program=programs(world, environment=environment))
        def play(program: Program) -> None:
            try:
                played = torment(program, ranks).played
            except WrongError as err:
                if not smallest:  # what happens once in a while may not happen again while it is made smaller
                    self._tell(err, f"{world}.{number}.first")
                smallest[:] = [err]
                raise
            if not smallest:
                self.programs += 1
                self.actions.update(type(action).__name__ for action in played.actions)

        with contextlib.redirect_stderr(None):
            try:
                play()
            except Exception:  # Hypothesis wraps it, and calls what does not happen again by another name
                if not smallest:
                    raise
        if smallest:
            self.wrong += 1
            self.programs += 1
            self._tell(smallest[0], f"{world}.{number}")

    def _tell(self, err: WrongError, name: str) -> None:
        trouble, _, program = str(err).partition("\nin\n")
        print(f"wrong: {trouble}", flush=True)
        if self._keep is not None:
            self._keep.mkdir(parents=True, exist_ok=True)
            (self._keep / f"{name}.json").write_text(program)
            (self._keep / f"{name}.txt").write_text(trouble)


def main() -> int:
    """The exit status."""
    flags = parser(__doc__ or "")
    flags.add_argument("--programs", type=int, default=2000)
    flags.add_argument("--keep", type=Path, metavar="FOLDER", help="write programs that go wrong there")
    args = flags.parse_args()
    total = 120 if args.quick else args.programs
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # programs do what PyTorch and Sirtaki warn of
    report = Report(name="torment")
    begin_s, number, all_actions = time.monotonic(), 1000 * args.seed, Counter[str]()
    for world, share in SHARES.items():
        environments = environments_of(world)
        tallies = {" ".join(chosen.values()) or "default": Tally(args.keep) for chosen in environments}
        with Ranks(world) as ranks:
            left, turn = round(share * total), 0
            while left > 0:
                environment = environments[turn % len(environments)]
                count = min(left, CHUNK)
                tally = tallies[" ".join(environment.values()) or "default"]
                tally.chunk(ranks, world, environment, count, number)
                left, turn, number = left - count, turn + 1, number + 1
        for name, tally in tallies.items():
            if tally.programs:
                report.rows.append(_row(world, name, tally))
                all_actions += tally.actions
    wrong = sum(row["wrong"] for row in report.rows)
    report.settings["actions"] = dict(all_actions.most_common())
    report.notes.append(f"{time.monotonic() - begin_s:.0f} s")
    report.bars.append(Bar(claim="programs that train otherwise than one process does", value=wrong, limit=0.0))
    return finish(report, args)


def _row(world: int, name: str, tally: Tally) -> dict[str, Any]:
    return {
        "ranks": world,
        "environment": name,
        "programs": tally.programs,
        "actions": sum(tally.actions.values()),
        "steps": tally.actions["Step"] + tally.actions["Epoch"],
        "wrong": tally.wrong,
    }


if __name__ == "__main__":
    sys.exit(main())
