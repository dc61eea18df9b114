"""Record the times of all settings of a real job, for the evaluation of tuners (`bench.landscapes`).

    python -m bench.sweep --job two-ranks-transformer        (--list shows the jobs; --all records them one by one)

A job trains a network on this host, or an emulated network on the emulated cluster, over a synchroniser without a
tuner. Settings are a lattice of unit sizes, streams and routes, the untuned default, and the planners' proposals from
probes like the warm-up's. All settings alternate for some rounds. The first step after a change of the setting is not
measured. `bench/recorded/JOB.json` keeps, for each setting and round, the span and the time of the whole step, and the
planners' model. The span is the time from the first ready gradient to the last reduced one, on the rank where it is
shortest, as the tuner measures it. The time of the step is the longest over the ranks.

Jobs whose names begin with "asked" are used only to evaluate replays (`bench.replay --errors`), on a route that replays
can predict. No model was ever fitted to jobs with "unseen" in their names. These files are in `bench/recorded/replay`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import nn

from bench.lib.cluster import MBIT, LabError, LabShape
from bench.lib.contenders import Bare
from bench.lib.harness import alternate, machine, parser, versions
from bench.lib.landscapes.recorded import RECORDED
from bench.lib.models import emulated, emulated_resnet50, lstm, mlp, small_conv, token_transformer, transformer
from bench.lib.ranks import run_ranks, start
from bench.lib.workloads import workload
from sirtaki.autotune.knobs import Knobs
from sirtaki.autotune.model.planning import Forecast, PlanningModel
from sirtaki.comm.plan import Algorithm, Route, TransportKind
from sirtaki.measures import SMALLEST_UNIT_BYTES

STREAMS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
OCTAVES = 9  # Unit sizes from 64 KiB to 16 MiB.
JOB_TIMEOUT_S = 1800.0

Made = tuple[nn.Module, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """A job whose settings are to be measured.

    Attributes:
        name: name of the job and of its file.
        ranks: total number of ranks.
        make: creates the network and its input, by rank.
        cluster: emulated nodes, None = this host.
        ranks_per_node: ranks per node of the emulated cluster.
        octaves: number of unit sizes, each twice the previous one.
        streams: numbers of streams.
        only: the only route to record, None = all.
        rounds: measurements of each setting.
    """

    name: str
    ranks: int
    make: Callable[..., Made]
    cluster: LabShape | None = None
    ranks_per_node: int = 1
    octaves: int = OCTAVES
    streams: tuple[int, ...] = STREAMS
    only: Route | None = None
    rounds: int = 5

    @property
    def path(self) -> Path:
        """Return the path of the job's file."""
        return (RECORDED / "replay" if self.name.startswith("asked") else RECORDED) / f"{self.name}.json"


def _emulated(*, rank: int) -> Made:
    return emulated_resnet50(rank=rank, compute_s=0.24, scale=0.1)


def _network(network: str, *, megabytes: float = 8.0, compute_s: float = 0.2) -> Callable[..., Made]:
    work = workload(network)
    return partial(emulated, work.scaled(1e6 * megabytes / work.layout.total_bytes), compute_s=compute_s)


def _perceptron(*, rank: int) -> Made:
    return mlp((512, 1024, 1024, 1024, 1024, 10), rank=rank, batch=64)


def _cluster(link: int, flow: int, *, nodes: int = 4, delay_ms: float = 0.0) -> LabShape:
    return LabShape(nodes=nodes, link_bits_per_s=link * MBIT, flow_bits_per_s=flow * MBIT, delay_s=1e-3 * delay_ms)


_FEW: dict[str, Any] = {"streams": (1, 2, 4, 8, 16), "rounds": 4}
_CLUSTER: dict[str, Any] = {**_FEW, "octaves": 7, "only": (TransportKind.GLOO, Algorithm.FLAT)}
_MEMORY: dict[str, Any] = {"ranks": 2, **_FEW, "only": (TransportKind.SHARED_MEMORY, Algorithm.FLAT)}


def _asked(name: str, network: str, link: int, flow: int, nodes: int, **changes: float) -> RecordedJob:
    """Return a job that evaluates replays: a network on emulated nodes."""
    make, cluster = _network(network, **changes), _cluster(link, flow, nodes=nodes)
    return RecordedJob(name=name, ranks=nodes, make=make, cluster=cluster, **_CLUSTER)


JOBS = {
    job.name: job
    for job in (
        RecordedJob(name="two-ranks-transformer", ranks=2, make=transformer),
        RecordedJob(name="two-ranks-conv", ranks=2, make=small_conv),
        RecordedJob(name="two-ranks-resnet", ranks=2, make=_emulated, **_FEW),
        RecordedJob(name="four-ranks-transformer", ranks=4, make=transformer, **_FEW),
        RecordedJob(name="four-ranks-conv", ranks=4, make=small_conv, **_FEW),
        RecordedJob(name="four-ranks-resnet", ranks=4, make=_emulated, **_FEW),
        RecordedJob(name="cluster-400-100", ranks=4, make=_emulated, cluster=_cluster(400, 100), **_CLUSTER),
        RecordedJob(name="cluster-200-200", ranks=4, make=_emulated, cluster=_cluster(200, 200), **_CLUSTER),
        RecordedJob(
            name="cluster-400-100-delay", ranks=4, make=_emulated, cluster=_cluster(400, 100, delay_ms=5), **_CLUSTER
        ),
        RecordedJob(
            name="cluster-2x2", ranks=4, make=_emulated, cluster=_cluster(400, 100, nodes=2), ranks_per_node=2, **_FEW
        ),
        _asked("asked-cluster-vgg-300-150", "vgg16", 300, 150, 4),
        _asked("asked-cluster-bert-500-100", "bert_base", 500, 100, 4),
        _asked("asked-cluster-gpt2-400-200-two", "gpt2", 400, 200, 2),
        _asked("asked-cluster-densenet-200-100-three", "densenet201", 200, 100, 3, megabytes=5.0),
        RecordedJob(name="asked-two-ranks-bert", make=_network("bert_base", megabytes=16.0), **_MEMORY),
        RecordedJob(name="asked-two-ranks-vgg", make=_network("vgg16", megabytes=32.0), **_MEMORY),
        RecordedJob(name="asked-two-ranks-lstm", make=lstm, **_MEMORY),
        _asked("asked-unseen-cluster-inception-600-200", "inception_v4", 600, 200, 4, megabytes=12.0),
        _asked("asked-unseen-cluster-resnet-250-250-three", "resnet50", 250, 250, 3, compute_s=0.3),
        _asked("asked-unseen-cluster-bert-300-75-two", "bert_large", 300, 75, 2, compute_s=0.15),
        RecordedJob(name="asked-unseen-two-ranks-gpt2", make=_network("gpt2", megabytes=24.0), **_MEMORY),
        RecordedJob(name="asked-unseen-two-ranks-perceptron", make=_perceptron, **_MEMORY),
        RecordedJob(name="asked-unseen-two-ranks-texts", make=token_transformer, **_MEMORY),
    )
}


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def settings(bare: Bare, job: RecordedJob) -> list[Knobs]:
    """Return the lattice and the untuned setting."""
    sizes = [SMALLEST_UNIT_BYTES * 2**octave for octave in range(job.octaves)]
    sizes = [size for size in sizes if size <= bare.space.unit_bytes[1]]
    streams = [count for count in job.streams if count <= bare.space.streams[-1]]
    points = [
        Knobs(unit_bytes=size, streams=count, transport=transport, algorithm=algorithm)
        for size, count, (transport, algorithm) in product(sizes, streams, bare.space.routes)
    ]
    return list(dict.fromkeys([bare.default, *points]))


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank: measure all settings of the job alternately. Collective."""
    from sirtaki.autotune.arms.planners import make_planners
    from sirtaki.engine import job as engine_job

    job = JOBS[options["job"]]
    bare = Bare(engine_job.current(), *job.make(rank=comm.rank), only=job.only)
    plans: list[tuple[str, Knobs]] = []
    if bare.known is not None:
        for planner in make_planners(space=bare.space, model=bare.known):
            plans += [(planner.name, proposal.knobs) for proposal in planner.ask(len(bare.space.routes))]
    plans = comm.bcast(plans)
    measured = [*(("", knobs) for knobs in settings(bare, job)), *plans]
    begin_s = time.monotonic()
    turns = {number: partial(bare.measure, knobs) for number, (_, knobs) in enumerate(measured)}
    samples_of: Any = alternate(turns, job.rounds, seed=options["seed"])  # type: ignore[arg-type]
    bare.close()

    def names(routes: Sequence[Route]) -> list[list[str]]:
        return [[transport.value, algorithm.value] for transport, algorithm in routes]

    return {
        "sizes": list(bare.layout.sizes),
        "default": bare.default.to_json(),
        "routes": names(bare.space.routes),
        "streams": list(bare.space.streams),
        "narrowed_routes": names(bare.narrowed.routes),
        "narrowed_streams": list(bare.narrowed.streams),
        "unit_bytes": list(bare.space.unit_bytes),
        "model": None if bare.known is None else bare.known.to_json(),
        "rows": [
            {
                "arm": arm,
                "knobs": knobs.to_json(),
                "spans_s": [_short(span_s) for span_s, _ in samples],
                "steps_s": [_short(step_s) for _, step_s in samples],
            }
            for (arm, knobs), samples in zip(measured, samples_of.values(), strict=True)
        ],
        "seconds": round(time.monotonic() - begin_s),
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def record(job: RecordedJob, *, seed: int) -> Path:
    """Run a job and write its file. Return the path."""
    result = run_ranks(
        "bench.sweep",
        job.cluster or job.ranks,
        {"job": job.name, "seed": seed},
        ranks_per_node=job.ranks_per_node,
        timeout_s=JOB_TIMEOUT_S,
    )
    head = {
        "job": job.name,
        "command": f"python -m bench.sweep --job {job.name}",
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
    }
    rows = result.pop("rows")
    path = job.path
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    body = json.dumps({**head, **result}, separators=(",", ":"))
    path.write_text(f'{body[:-1]},"rows":[\n{lines}\n]}}\n')
    return path


def model_rank_correlation(data: Mapping[str, Any]) -> float:
    """Return the rank correlation of predicted and measured times of the recorded settings; NaN without a model."""
    if data["model"] is None:
        return math.nan
    forecast = Forecast(PlanningModel.from_json(data["model"]))
    both = [
        (predicted_s, statistics.median(row["spans_s"]))
        for row in data["rows"]
        if (predicted_s := forecast.predicted_s(Knobs.from_json(row["knobs"]))) is not None
    ]
    return float(spearmanr(*zip(*both, strict=True)).statistic)


def describe(path: Path) -> str:
    """Describe a file in one line."""
    data = json.loads(path.read_text())
    rows: Sequence[Mapping[str, Any]] = data["rows"]
    medians = {json.dumps(row["knobs"]): statistics.median(row["spans_s"]) for row in rows}
    default_s = medians[json.dumps(data["default"])]
    best = min(rows, key=lambda row: statistics.median(row["spans_s"]))
    best_s = statistics.median(best["spans_s"])
    scatter = statistics.median(
        statistics.median(abs(span_s - statistics.median(row["spans_s"])) for span_s in row["spans_s"])
        / statistics.median(row["spans_s"])
        for row in rows
    )
    who = f"{Knobs.from_json(best['knobs']).describe()}{', ' + best['arm'] if best['arm'] else ''}"
    return (
        f"{data['job']}: {len(rows)} settings in {data['seconds']} s, untuned {1e3 * default_s:.4g} ms, best "
        f"{1e3 * best_s:.4g} ms ({who}), "
        f"typical deviation {100 * scatter:.1f} %, rank correlation with what planners predict "
        f"{model_rank_correlation(data):.2f}, {path.stat().st_size / 1024:.0f} KiB"
    )


def main() -> int:
    """Record one job or all jobs, or list them."""
    flags = parser(__doc__)
    flags.add_argument("--job", choices=JOBS)
    flags.add_argument("--all", action="store_true")
    flags.add_argument("--list", action="store_true", help="list the jobs, with a summary of each recording")
    args = flags.parse_args()
    if args.list:
        for name, job in JOBS.items():
            print(describe(job.path) if job.path.exists() else f"{name}: not recorded")
        return 0
    names = list(JOBS) if args.all else [args.job]
    if names == [None]:
        flags.error("one of --job, --all and --list is required")
    missing = 0
    for name in names:
        try:
            print(describe(record(JOBS[name], seed=args.seed)), flush=True)
        except LabError as err:
            print(f"{name}: {err}", file=sys.stderr)
            missing += 1
    return min(missing, 1)


if __name__ == "__main__":
    sys.exit(start(main, on_rank))
