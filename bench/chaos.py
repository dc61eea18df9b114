"""Chaos run: jobs of three ranks, each hit at a random moment by one fault (or two), and what becomes of them.

A fault that training cannot survive must end the whole job within its time, with the exit code of the rank that failed
and a message that names the rank and what was not done. One that training can survive must leave the weights right and
the exit code 0. Nothing may be left: processes, shared memory, listening sockets, temporary files.
"""

from __future__ import annotations

import io
import json
import math
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import chaos_job, chaos_scene
from bench.chaos_faults import RANKS, SIGNALS, STEPS, TWO, Fault, Scenario, Stage, Strike, draw
from bench.chaos_scene import STALL_SHUTDOWN_S, STOPPED_S, Job, Outcome
from bench.lib.harness import Bar, Report, Spread, finish, parser

END_S = 20.0
"""From the fault to the end of the job, besides the stall time where that must pass first."""

TOLERANCE = 1e-4
UNDONE = re.compile(r"iteration \d+|has not computed|waits? for|missing: rank|has ended its script")


def judge(scenario: Scenario, outcome: Outcome, reference: NDArray[np.float64]) -> list[str]:
    """What is wrong with how a job ended; empty if nothing is."""
    complaints = [f"{len(outcome.left)} left: {outcome.left[0]}"] if outcome.left else []
    if outcome.returncode is None:
        return [*complaints, "did not end"]
    fatal = [(strike, steps) for strike, steps in outcome.struck if strike.fault.ends_the_job]
    codes = {code for strike, _ in fatal for code in _codes(strike)}
    if not fatal or all(_came_late(strike, steps) for strike, steps in fatal):
        codes.add(0)
    if outcome.returncode not in codes:
        complaints.append(f"exit code {outcome.returncode}, not {' or '.join(map(str, sorted(codes)))}")
    if outcome.returncode == 0:
        complaints += _wrong_weights(outcome, reference)
    stops = [(strike, steps) for strike, steps in fatal if strike.fault is Fault.STOP]
    # A rank that has nothing to do any more holds nobody up, and the job ends with it.
    stopped_s = STOPPED_S if any(_came_late(*stop) for stop in stops) else STALL_SHUTDOWN_S if stops else 0.0
    if outcome.end_s > END_S + stopped_s:
        complaints.append(f"took {outcome.end_s:.1f} s to end")
    if fatal and outcome.returncode != 0 and not _is_silenced(outcome):
        complaints += _unsaid(fatal, outcome.said)
    if not fatal and "Traceback" in outcome.output:
        complaints.append("a traceback though nothing ended the job")
    return complaints


def _came_late(strike: Strike, steps: int) -> bool:
    """Whether the rank had perhaps ended its script."""
    return strike.stage is Stage.END or steps >= STEPS


def _codes(strike: Strike) -> set[int]:
    """Exit codes that are right after this fault."""
    match strike.fault:
        case Fault.KILL | Fault.SEGMENTATION:
            return {128 + SIGNALS[strike.fault]}
        case Fault.RAISE | Fault.STOP:
            return {1}
        case Fault.EXIT | Fault.EXIT_IN_C:
            return {strike.exit_code}
        case Fault.OUT_OF_MEMORY:
            return {1, 128 + signal.SIGABRT}  # C++ may see it first
        case Fault.INTERRUPT:
            return {128 + signal.SIGINT}
        case Fault.TERMINATE:
            return {128 + signal.SIGTERM}
        case Fault.LAUNCHER_KILLED:
            return {-signal.SIGKILL}
        case Fault.MPIEXEC_KILLED:
            return {128 + signal.SIGKILL, 1}
    return {0}


def _is_silenced(outcome: Outcome) -> bool:
    """Whether nobody could read, or nobody was left to write."""
    return any(
        strike.fault in (Fault.OUTPUT_CLOSED, Fault.OUTPUT_FULL, Fault.LAUNCHER_KILLED) for strike, _ in outcome.struck
    )


def _unsaid(fatal: Sequence[tuple[Strike, int]], said: str) -> list[str]:
    """What a reader of the output is not told: which rank it was, and what was not done."""
    if any(strike.fault in (Fault.INTERRUPT, Fault.TERMINATE, Fault.MPIEXEC_KILLED) for strike, _ in fatal):
        return []
    complaints = []
    if not any(re.search(rf"\brank {strike.rank}\b", said) for strike, _ in fatal):
        complaints.append(f"rank {fatal[0][0].rank} is not named")
    in_training = all(0 < steps < STEPS for _, steps in fatal)
    if in_training and not UNDONE.search(said):
        complaints.append("no word of what was not done")
    return complaints


def _wrong_weights(outcome: Outcome, reference: NDArray[np.float64]) -> list[str]:
    if len(outcome.weights) < RANKS:
        return [f"exit code 0, and no weights of {RANKS - len(outcome.weights)} ranks"]
    found = [np.load(io.BytesIO(raw)) for _, raw in sorted(outcome.weights.items())]
    if any(not np.array_equal(found[0], other) for other in found[1:]):
        return ["ranks differ"]
    error = float(np.abs(found[0] - reference).max())
    return [f"weights are off by {error:.2g}"] if not error < TOLERANCE else []


def main() -> int:
    """Runs the jobs one after the other."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--jobs", type=int, help="how many (300; 12 with --quick)")
    flags.add_argument("--only", metavar="WORDS", help="with commas: numbers of jobs, or names of faults (KILL,PAUSE)")
    flags.add_argument("--keep", type=Path, metavar="FILE", help="a line a job; those in it are not run again")
    flags.add_argument("--show", type=Path, metavar="FOLDER", help="the output of jobs that went wrong")
    args = flags.parse_args()
    try:
        chaos_scene.enter()
    except chaos_scene.SceneError as err:
        print(f"chaos: {err}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and so take the job away
    args.jobs = args.jobs or (12 if args.quick else 300)
    only = set(args.only.split(",")) if args.only else None
    results: dict[int, Result] = {}
    if args.keep is not None and args.keep.exists():
        results = {result["number"]: result for result in map(json.loads, args.keep.read_text().splitlines())}
    reference = chaos_job.reference(RANKS, STEPS).numpy()
    for scenario in draw(args.jobs, args.seed):
        words = {str(scenario.number), "+".join(strike.fault.name for strike in scenario.strikes)}
        if scenario.number not in results and (only is None or words & only):
            outcome = Job(scenario).run()
            result = results[scenario.number] = _result(scenario, outcome, judge(scenario, outcome, reference))
            print(_line(result), flush=True)
            if args.keep is not None:
                with args.keep.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            if args.show is not None and result["wrong"]:
                args.show.mkdir(parents=True, exist_ok=True)
                text = "\n".join([_line(result), str(scenario), "", outcome.output, "", "left:", *outcome.left])
                (args.show / f"{scenario.number}.txt").write_text(text)
    for name in ("only", "keep", "show"):
        delattr(args, name)
    return finish(_report(list(results.values())), args)


Result = dict[str, Any]  # Any: as JSON has it
"""What is kept of a job."""


def _result(scenario: Scenario, outcome: Outcome, wrong: list[str]) -> Result:
    return {
        "number": scenario.number,
        "fault": scenario.name,
        "transport": scenario.transport,
        "struck": [[strike.fault.name, strike.rank, steps] for strike, steps in outcome.struck],
        "returncode": outcome.returncode,
        "end_s": None if math.isnan(outcome.end_s) else round(outcome.end_s, 3),
        "life_s": round(outcome.life_s, 3),
        "wrong": wrong,
    }


def _line(result: Result) -> str:
    struck = ", ".join(f"{fault} rank {rank} step {steps}" for fault, rank, steps in result["struck"])
    verdict = "; ".join(result["wrong"]) or "right"
    return f"{result['number']:4} {struck or 'not struck'}: {result['returncode']}, {result['life_s']:.1f} s, {verdict}"


def _report(results: Sequence[Result]) -> Report:
    report = Report(name="chaos")
    for name in [*(fault.value for fault in Fault), TWO]:
        jobs = [result for result in results if result["fault"] == name]
        ends_s = [result["end_s"] for result in jobs if result["end_s"] is not None]
        if jobs:
            report.rows.append(
                {
                    "fault": name,
                    "jobs": len(jobs),
                    "right": sum(not result["wrong"] for result in jobs),
                    "struck": sum(bool(result["struck"]) for result in jobs),
                    "end_s": Spread.of(ends_s) if ends_s else None,
                    "worst_end_s": max(ends_s, default=None),
                }
            )
    wrong = [result for result in results if result["wrong"]]
    report.notes += [f"wrong: {_line(result)}" for result in wrong]
    claim = f"jobs of {len(results)} that did not end as they must"
    report.bars.append(Bar(claim=claim, value=float(len(wrong)), limit=0.0))
    return report


if __name__ == "__main__":
    sys.exit(main())
