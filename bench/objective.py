"""By what to judge a trial: which measure of a few iterations chooses the setting that trains fastest in the long run.

    python -m bench.objective [--quick] [--save] [--jobs two-ranks-conv …] [--seconds S]

Takes 2 minutes a job. A job trains with an ordinary loop; the fastest 24 of 48 settings take turns in random order,
each for a few iterations after one that does not count. Each iteration is judged three ways:

- *span*: from the first ready gradient to the last reduced one, on the rank where that is shortest;
- *iteration*: from one iteration's last reduced gradient to the next one's, on the rank where that is longest;
- *corrected*: the span, and what the rest of the iteration took more or less than it usually does on this rank, within
  half of that; the shortest over the ranks.

The truth is the mean time of an iteration over all rounds, the longest and the shortest quarter left out. A tuner's
choice is replayed many times: one round of each setting is drawn, its first iterations are its trial, and the fastest
by each measure is chosen. What counts is what that takes in all *other* rounds, as a share of the untuned setting, and
how well the order of the trials agrees with that of the other rounds (Spearman). Then the same where the script loads
data irregularly, which is added to what was measured: on one rank, a fifth of the iterations take up to half as long
again, and one in thirty three times as long.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.lib.cluster import LabShape, NetLab, why_unavailable
from bench.lib.contenders import Sirtaki
from bench.lib.harness import (
    Report,
    finish,
    give_result,
    main_or_rank,
    parser,
    rank_argv,
    rank_env,
    run_ranks,
    take_result,
)
from bench.lib.models import emulated_resnet50, small_conv, transformer
from sirtaki.autotune.knobs import KIB, MIB, Knobs

MBIT = 1_000_000
DRAWN, SETTINGS, ITERATIONS, LEAST_ROUNDS = 48, 24, 4, 3
UNIT_BYTES, STREAMS = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB), (1, 2, 4, 8, 16)
TRIALS = (1, 2, 4)
DRAWS = 2000
MEASURES = ("span", "iteration", "corrected")
JOB_TIMEOUT_S = 600.0

Made = tuple[nn.Module, torch.Tensor]
Samples = np.ndarray[tuple[int, int, int, int], np.dtype[np.float64]]
"""Seconds, `(n_settings, n_rounds, n_iterations, n_ranks)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What trains.

    Attributes:
        ranks: in all.
        make: the network and its input, by rank.
        cluster: emulated nodes, one rank each, where only Gloo is tried; None = this host.
    """

    ranks: int
    make: Callable[[int], Made]
    cluster: LabShape | None = None


def _emulated(rank: int, scale: float) -> Made:
    return emulated_resnet50(rank=rank, compute_s=2.4 * scale, scale=scale)


def _conv(rank: int) -> Made:
    return small_conv(rank=rank)


def _transformer(rank: int) -> Made:
    return transformer(rank=rank)


def _cluster(link: int, flow: int) -> LabShape:
    return LabShape(nodes=4, link_bits_per_s=link * MBIT, flow_bits_per_s=flow * MBIT)


JOBS = {
    "two-ranks-transformer": Job(ranks=2, make=_transformer),
    "two-ranks-conv": Job(ranks=2, make=_conv),
    "two-ranks-resnet": Job(ranks=2, make=partial(_emulated, scale=0.04)),
    "four-ranks-transformer": Job(ranks=4, make=_transformer),
    "four-ranks-conv": Job(ranks=4, make=_conv),
    "four-ranks-resnet": Job(ranks=4, make=partial(_emulated, scale=0.04)),
    "cluster-400-100-resnet": Job(ranks=4, make=partial(_emulated, scale=0.02), cluster=_cluster(400, 100)),
    "cluster-200-200-conv": Job(ranks=4, make=_conv, cluster=_cluster(200, 200)),
}


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────


class Watched:
    """An untuned job whose iterations are timed, and which runs any setting."""

    def __init__(self, make: Callable[[], Made]) -> None:
        self._job = Sirtaki(make, tune=False)
        assert self._job._sync is not None
        self.tuned = self._job._sync
        self._times_s: list[tuple[float, float]] = []
        self._ended_s = 0.0
        reduced = self.tuned.synchroniser.finish

        def timed(**options: Any) -> Any:
            report = reduced(**options)
            now_s = time.perf_counter()
            self._times_s.append((report.span_s, now_s - self._ended_s))
            self._ended_s = now_s
            return report

        self.tuned.synchroniser.finish = timed  # type: ignore[method-assign]
        for _ in range(4):  # the order is learnt
            self._job.step()

    def measure(self, knobs: Knobs, iterations: int = ITERATIONS) -> list[tuple[float, float]]:
        """Collective: span and time of iterations with this setting, on this rank."""
        self.tuned._apply(knobs)
        for _ in range(1 + iterations):
            self._job.step()
        times_s, self._times_s = self._times_s[-iterations:], []
        return times_s


def settings(watched: Watched, seed: int, *, one_route: bool) -> list[Knobs]:
    """The untuned one, and others from all over the lattice."""
    space, default = watched.tuned._space, watched.tuned._default
    routes = space.routes[:1] if one_route else space.routes
    lattice = [
        Knobs(unit_bytes=size, streams=count, transport=transport, algorithm=algorithm)
        for size, count, (transport, algorithm) in product(UNIT_BYTES, STREAMS, routes)
        if size <= space.unit_bytes[1] and count in space.streams
    ]
    others = [knobs for knobs in lattice if knobs != default]
    places = np.random.default_rng(seed).permutation(len(others))[: DRAWN - 1]
    return [default, *(others[place] for place in places)]


def on_rank(options: Mapping[str, Any]) -> None:
    """What each rank does; the first one gives the result."""
    from mpi4py import MPI

    import sirtaki.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    comm, job = MPI.COMM_WORLD, JOBS[options["job"]]
    watched = Watched(lambda: job.make(comm.rank))
    points = settings(watched, options["seed"], one_route=job.cluster is not None)
    rounds: list[Any] = []
    rng = np.random.default_rng(options["seed"])
    once_s = [watched.measure(knobs, 1)[0][1] for knobs in points]
    fastest = np.argsort(comm.bcast(once_s)[1:])[: SETTINGS - 1] + 1
    points = [points[place] for place in [0, *fastest]]
    begin_s = time.monotonic()
    while comm.bcast(time.monotonic() - begin_s < options["seconds"]) or len(rounds) < LEAST_ROUNDS:
        mine: dict[int, Any] = {place: watched.measure(points[place]) for place in rng.permutation(len(points))}
        rounds.append(comm.gather([mine[place] for place in range(len(points))]))
    if comm.rank == 0:
        times_s = np.array(rounds).transpose(2, 0, 3, 1, 4)  # settings, rounds, iterations, ranks, span and iteration
        give_result({"settings": [knobs.describe() for knobs in points], "times_s": np.round(times_s, 7).tolist()})
    comm.Barrier()
    hvd.shutdown()


# ── what follows from it ─────────────────────────────────────────────────────────────────────────────────────────


def judged(spans_s: Samples, steps_s: Samples) -> dict[str, Any]:
    """Each iteration by each measure, `(n_settings, n_rounds, n_iterations)`."""
    rest_s = steps_s - spans_s
    usual_s = np.median(rest_s, axis=(0, 1, 2))
    corrected_s = spans_s + np.clip(rest_s - usual_s, -0.5 * usual_s, 0.5 * usual_s)
    return {"span": spans_s.min(axis=3), "iteration": steps_s.max(axis=3), "corrected": corrected_s.min(axis=3)}


def with_loading(spans_s: Samples, steps_s: Samples, rng: np.random.Generator) -> tuple[Samples, Samples]:
    """The same if the first rank waits for data now and then, and the others for it."""
    shape = steps_s.shape[:3]
    step_s = float(np.median(steps_s))
    late_s = step_s * np.where(rng.random(shape) < 0.2, rng.uniform(0.0, 0.5, shape), 0.0)
    late_s += np.where(rng.random(shape) < 1 / 30, 2.0 * step_s, 0.0)
    waits = np.arange(steps_s.shape[3]) > 0
    return spans_s + late_s[..., None] * waits, steps_s + late_s[..., None]


def rank_correlation(first: Any, second: Any) -> float:
    """Spearman's."""
    orders = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*orders)[0, 1])


def middle(samples: Any) -> Any:
    """Hodges' and Lehmann's, over the last axis, as trials are summed up."""
    pairs = [(i, j) for i in range(samples.shape[-1]) for j in range(i, samples.shape[-1])]
    return np.median(np.stack([(samples[..., i] + samples[..., j]) / 2 for i, j in pairs]), axis=0)


def trimmed(samples: Any) -> Any:
    """Means over all axes but the first, without the quarters at the ends."""
    ordered = np.sort(samples.reshape(len(samples), -1), axis=1)
    cut = ordered.shape[1] // 4
    return ordered[:, cut : ordered.shape[1] - cut].mean(axis=1)


def compare(true_s: Any, measured_s: Any, *, trial: int, rng: np.random.Generator) -> dict[str, float]:
    """What a measure is worth.

    Args:
        true_s: iterations, `(n_settings, n_rounds, n_iterations)`.
        measured_s: the same by the measure.
        trial: iterations of one.
        rng: draws.

    Returns:
        What the chosen setting takes in the other rounds, as a share of the untuned one, and the rank correlation of
        trials with the other rounds; means over draws.
    """
    n_settings, n_rounds, _ = true_s.shape
    trials_s = middle(measured_s[:, :, :trial])
    others_s = np.stack([trimmed(np.delete(true_s, number, axis=1)) for number in range(n_rounds)], axis=1)
    untuned_s = trimmed(true_s)[0]
    taken_s, correlations = [], []
    for _ in range(DRAWS):
        drawn = rng.integers(n_rounds, size=n_settings)
        found_s = trials_s[np.arange(n_settings), drawn]
        chosen = int(found_s.argmin())
        taken_s.append(others_s[chosen, drawn[chosen]])
        correlations.append(rank_correlation(found_s, others_s[np.arange(n_settings), drawn]))
    return {"chosen": float(np.mean(taken_s) / untuned_s), "rank_correlation": float(np.mean(correlations))}


def noise(measured_s: Any) -> float:
    """Typical deviation of one iteration from its setting's median, as a share of it."""
    flat = measured_s.reshape(len(measured_s), -1)
    medians = np.median(flat, axis=1, keepdims=True)
    return float(np.median(np.abs(flat / medians - 1.0))) / 0.6745


def rows(name: str, result: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """One for each measure, and what there is to choose from."""
    times_s = np.array(result["times_s"])
    spans_s, steps_s = times_s[..., 0], times_s[..., 1]
    true_s = steps_s.max(axis=3)
    half = true_s.shape[1] // 2
    found = []
    rng = np.random.default_rng(seed)
    by_measure = judged(spans_s, steps_s)
    loading = with_loading(spans_s, steps_s, rng)
    beside_loading = judged(*loading)
    for measure in MEASURES:
        measured_s = by_measure[measure]
        trials = {trial: compare(true_s, measured_s, trial=trial, rng=rng) for trial in TRIALS}
        loaded = {trial: compare(true_s, beside_loading[measure], trial=trial, rng=rng) for trial in TRIALS[:2]}
        of_rounds = trimmed(measured_s[:, :half]), trimmed(true_s[:, half:])
        found.append(
            {
                "job": name,
                "measure": measure,
                "noise": round(noise(measured_s), 4),
                **{f"correlation_of_{trial}": round(each["rank_correlation"], 2) for trial, each in trials.items()},
                "of_half_the_rounds": round(rank_correlation(*of_rounds), 2),
                **{f"chosen_of_{trial}": round(each["chosen"], 3) for trial, each in trials.items()},
                **{f"chosen_beside_loading_of_{trial}": round(each["chosen"], 3) for trial, each in loaded.items()},
            }
        )
    return found


def run(name: str, options: Mapping[str, Any]) -> Any:
    """What the ranks of one job found."""
    job = JOBS[name]
    options = {**options, "job": name}
    if job.cluster is None:
        return run_ranks("bench.objective", job.ranks, options, env=rank_env(), timeout_s=JOB_TIMEOUT_S)
    with NetLab(job.cluster) as lab:
        return take_result(
            lab.run_ranks(rank_argv("bench.objective", options), env=rank_env(), timeout_s=JOB_TIMEOUT_S)
        )


def main() -> int:
    """Runs every job."""
    flags = parser(__doc__.split("\n")[0])
    flags.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    flags.add_argument("--seconds", type=float, help="of a job; default 100, quick 30")
    args = flags.parse_args()
    args.seconds = args.seconds or (30.0 if args.quick else 100.0)
    report = Report(name="objective")
    for name in args.jobs:
        if JOBS[name].cluster is not None and (reason := why_unavailable()) is not None:
            print(f"{name}: the emulated cluster cannot run here: {reason}", file=sys.stderr)
            continue
        result = run(name, {"seed": args.seed, "seconds": args.seconds})
        times_s = np.array(result["times_s"])
        true_s = trimmed(times_s[..., 1].max(axis=3))
        report.notes.append(
            f"{name}: {len(true_s)} settings, {times_s.shape[1]} rounds of {ITERATIONS} iterations; iterations take "
            f"{1e3 * true_s.min():.3g} to {1e3 * true_s.max():.3g} ms, untuned {1e3 * true_s[0]:.3g}; fastest "
            f"{result['settings'][int(true_s.argmin())]}; median {1e3 * statistics.median(true_s.tolist()):.3g}"
        )
        report.rows += [{**row, "times_s": result["times_s"]} for row in rows(name, result, args.seed)]
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main_or_rank(main, on_rank))
