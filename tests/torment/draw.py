"""Draw programs at random for as long as wanted, and keep those that are wrong.

    PYTHONPATH=.:tests python -m torment.draw --seeds 100000 --programs 2000 --ranks 2 3 4 --over both --keep wrong

Each hypothesis seed gives up to 40 programs. A program that differs from one process is written to the folder `--keep`
as JSON, with the difference beside it. It is not reduced; `test_torment.py` reduces what it draws itself.
"""

import argparse
import itertools
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from .attached import attached_programs
from .program import Program
from .strategy import environments_of, programs
from .tormentor import Ranks, WrongError, torment

BATCH = 40
KINDS = {"optimizer": [programs], "ddp": [attached_programs], "both": [programs, attached_programs]}


def draw_batch(drawn: SearchStrategy[Program], number: int, count: int, judge: Callable[[Program], None]) -> None:
    """Pass `count` programs at most, drawn with the hypothesis seed `number`, to `judge`."""
    seed(number)(
        settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )(given(drawn)(judge))
    )()


def draw(arguments: argparse.Namespace) -> int:
    """Return the number of programs that were wrong."""
    worlds = [
        (kind, size, environment)
        for size, kind in itertools.product(arguments.ranks, KINDS[arguments.over])
        for environment in ([{}] if arguments.compiled else environments_of(size))
    ]
    played = wrong = 0
    began = time.monotonic()
    with Ranks(max(arguments.ranks), limit_s=120.0 if arguments.compiled else 20.0) as ranks:

        def judge(program: Program) -> None:
            nonlocal played, wrong
            played += 1
            try:
                torment(program, ranks)
            except WrongError as err:
                wrong += 1
                arguments.keep.mkdir(parents=True, exist_ok=True)
                kept = arguments.keep / f"{arguments.seeds}-{played}"
                kept.with_suffix(".txt").write_text(str(err))
                kept.with_suffix(".json").write_text(str(err).rpartition("\nin\n")[2])

        for number, (kind, size, environment) in enumerate(itertools.cycle(worlds), arguments.seeds):
            drawn = kind(size, environment=environment, compiles=arguments.compiled)
            draw_batch(drawn, number, min(BATCH, arguments.programs - played), judge)
            seconds = time.monotonic() - began
            of = f"{kind.__name__}, {size} ranks, {environment}"
            print(f"seed {number}: {of}: {played} programs, {wrong} wrong, {seconds:.0f} s", flush=True)
            if played >= arguments.programs or seconds > arguments.seconds:
                break
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m torment.draw", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, required=True, help="first hypothesis seed")
    parser.add_argument("--programs", type=int, default=1000, help="how many programs to draw (default: 1000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further batch begins after so long")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="sizes of the jobs")
    parser.add_argument("--over", choices=list(KINDS), default="both", help="DistributedOptimizer or attached DDP")
    parser.add_argument("--compiled", action="store_true", help="draw programs with compiled parts")
    parser.add_argument("--keep", type=Path, default=Path("wrong_programs"), help="folder for programs that are wrong")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.exit(draw(arguments) > 0)


if __name__ == "__main__":
    main()
