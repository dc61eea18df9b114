"""Demonstrate Sirtaki in under three minutes: one training job on this host and on four emulated nodes.

    make demo        (or: python -m bench.demo)

In each place, a first job tunes while it trains a small network on scikit-learn's digits, and stores its setting in a
registry. In a second job, four contenders take turns in the same processes: PyTorch DDP, Sirtaki untuned, with the
tuned setting, and with the setting that it finds in the registry (remembered). A paired comparison of their turns says
which differences are measured, with a 95 % interval. On a slow or busy machine, the jobs make fewer steps and turns.

The emulated nodes (`bench.lib.cluster`) are network namespaces. Their links carry 400 Mbit/s and a single connection
40, because clouds cap connections, too. On a machine without network namespaces the demonstration prints the reason and
skips the nodes. It keeps only the HTML reports.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.lib.cluster import LabError, LabShape, NetLab, why_unavailable
from bench.lib.harness import REPOSITORY
from bench.lib.ranks import in_turns, run_ranks, start
from sirtaki.autotune.paired import FEWEST_PAIRS, ONLY_LOOK, PairedComparison, interval
from sirtaki.cli.report import write_report
from sirtaki.measures import counted, in_ms

SHAPE = LabShape(nodes=4, link_bits_per_s=400_000_000, flow_bits_per_s=40_000_000)
DDP, UNTUNED, TUNED, REMEMBERED = "PyTorch DDP", "Sirtaki, untuned", "Sirtaki, tuned", "Sirtaki, remembered"
REPORTS = REPOSITORY / "build" / "demo"
JOB_TIMEOUT_S = 150.0
"""Maximum seconds of a job. It is reached only if the machine becomes much slower during the job."""
ROUNDS = 8
"""Maximum number of turns of each contender."""
LEAST_BUDGET = 12
"""Minimum number of training steps of a search on a slow machine."""
TELL_EVERY_S = 5.0
"""Seconds between two lines of progress."""

# Width of the table. It exceeds some terminals' width, because a table with cut intervals would mislead.
say = Console(highlight=False, soft_wrap=True, width=120).print


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One place where the jobs run.

    Attributes:
        name: name of the report's file.
        title: title of the table.
        width: width of the net's layers.
        budget: maximum number of steps of the search. Its proof may take 1.5 times as many in addition.
        tuning_s: maximum seconds of search and proof. On a slow machine, the search makes fewer steps.
        turns_s: seconds after which no further round of turns begins, if there are enough rounds for a comparison.
        block: steps of one turn.
    """

    name: str
    title: str
    width: int
    budget: int
    tuning_s: float
    turns_s: float
    block: int


HOST = Scene(name="one-host", title="2 ranks on this host", width=1536, budget=60, tuning_s=20.0, turns_s=15.0, block=5)
NODES = Scene(
    name="four-nodes",
    title="4 emulated nodes, links of 400 Mbit/s, one connection gets 40",
    width=1024,
    budget=40,
    tuning_s=60.0,
    turns_s=40.0,
    block=1,
)


# ── on the ranks ─────────────────────────────────────────────────────────────────────────────────────────────────────


def digits(comm: Any, width: int) -> tuple[Any, Any]:
    """Return the model, and a batch of this rank's images."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return model, torch.tensor(load_digits().data[comm.rank :: comm.size][:32], dtype=torch.float32) / 16


def on_rank(comm: Any, options: Mapping[str, Any]) -> Any:
    """Run one rank of the job that tunes, or of the job whose contenders take turns. Collective."""
    import sirtaki.torch as hvd
    from bench.lib.contenders import join_gloo

    def tell(**facts: Any) -> None:
        if comm.rank == 0:
            with Path(options["told"]).open("a") as file:
                file.write(json.dumps(facts) + "\n")

    hvd.init()
    model, images = digits(comm, options["width"])
    make_model = lambda: (copy.deepcopy(model), images)  # noqa: E731 - short
    if "knobs" not in options:
        return tune(comm, options, make_model, tell)
    join_gloo(comm, address=options["master"])
    return take_turns(comm, options, make_model, tell)


def tune(comm: Any, options: Mapping[str, Any], make_model: Any, tell: Callable[..., None]) -> dict[str, Any]:
    """Train until tuning has ended, and return the kept setting. Collective."""
    from bench.lib.contenders import Sirtaki

    step_s = _step_s(Sirtaki(make_model, tune=False), comm)
    budget = min(options["budget"], max(LEAST_BUDGET, int(options["tuning_s"] / (2.5 * step_s))))
    tell(text=f"an untuned step takes about {in_ms(step_s)}; the search may take {counted(budget, 'step')}")
    tuned = Sirtaki(make_model, tune=True, warmup_iterations=budget)
    _settle(tuned, comm, lambda steps: tell(text=f"tuning: {counted(steps, 'step')} made"))
    return {
        "knobs": tuned.sync.knobs.to_json(),
        "setting": tuned.describe(),
        "steps": tuned.steps,
        "budget": budget,
        "reason": _reason(tuned),
    }


def take_turns(comm: Any, options: Mapping[str, Any], make_model: Any, tell: Callable[..., None]) -> dict[str, Any]:
    """Return the step times of all contenders, which take turns, and their settings. Collective."""
    from bench.lib.contenders import Contender, Ddp, Sirtaki
    from sirtaki.autotune.knobs import Knobs

    tuned = Sirtaki(make_model, tune=False)
    remembered = Sirtaki(make_model, tune=True, warmup_iterations=options["budget"])
    contenders: dict[str, Contender] = {
        DDP: Ddp(make_model), UNTUNED: Sirtaki(make_model, tune=False), TUNED: tuned, REMEMBERED: remembered,
    }  # fmt: skip
    for contender in contenders.values():
        for _ in range(3):  # Steps in which the order of gradients is learned.
            contender.step()
    tuned.sync.apply(Knobs.from_json(options["knobs"]))
    tell(text="the remembered setting is compared with the default, as in any job that finds one")
    _settle(remembered, comm, lambda steps: tell(text=f"remembered: {counted(steps, 'step')} made"))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    steps = {name: contender.step for name, contender in contenders.items()}
    begin_s = told_s = time.monotonic()
    for number in range(ROUNDS):
        for name, (seconds,) in in_turns(steps, comm, rounds=1, block=options["block"], seed=number).items():
            samples[name].append(seconds)
        tell(samples=samples)
        now_s = time.monotonic()
        if now_s - told_s > TELL_EVERY_S:
            told_s = now_s
            tell(text=f"round {number + 1} of at most {ROUNDS}")
        took_s = comm.bcast(now_s - begin_s)
        if took_s > options["turns_s"] * (1 if number + 1 >= FEWEST_PAIRS else 3):
            break
    return {
        "samples": samples,
        "settings": {name: contender.describe() for name, contender in contenders.items()},
        "steps": remembered.warmup_steps,
        "reason": _reason(remembered),
    }


def _step_s(contender: Any, comm: Any) -> float:
    """Return the seconds of an untuned step on the slowest rank. Collective."""
    times_s = []
    for _ in range(5):
        begin_s = time.perf_counter()
        contender.step()
        times_s.append(time.perf_counter() - begin_s)
    return float(max(comm.allgather(median(times_s[2:]))))


def _settle(contender: Any, comm: Any, progress: Callable[[int], None]) -> None:
    """Run steps until the tuner has finished. Collective."""
    told_s = time.monotonic()
    while contender.sync.tuning:
        contender.warm_up(contender.warmup_steps + 1)
        if time.monotonic() - told_s > TELL_EVERY_S:
            told_s = time.monotonic()
            progress(contender.warmup_steps)


def _reason(contender: Any) -> str:
    """Return why the tuner has kept its setting; "" on ranks other than 0, because only rank 0 has the reason."""
    search = contender.sync._search
    return "" if search is None else str(search.reason)


# ── in the process that starts ranks ─────────────────────────────────────────────────────────────────────────────────


@contextmanager
def reading(path: Path) -> Iterator[dict[str, Any]]:
    """Print the lines of progress that a job writes to a file, until the body of the context ends.

    Yield a dict with all other facts that the job has written last.
    """
    facts: dict[str, Any] = {}
    ended = threading.Event()
    path.touch()

    def read() -> None:
        with path.open() as file:
            last = False
            while not last:
                last = ended.wait(0.2)
                while line := file.readline():
                    told = json.loads(line)
                    text = told.pop("text", None)
                    if text is not None:
                        say(f"    {text}")
                    facts.update(told)

    thread = threading.Thread(target=read, name="progress")
    thread.start()
    try:
        yield facts
    finally:
        ended.set()
        thread.join()


def run_scene(scene: Scene, where: int | NetLab) -> dict[str, Any]:
    """Run the job that tunes, then the job whose contenders take turns. Write the report of the first job.

    Returns:
        The results of both jobs, as far as there are any, and as "problem" why they are incomplete.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="sirtaki-demo-") as folder:
        told, log = Path(folder) / "told.jsonl", Path(folder) / "trials.jsonl"
        # Try no further setting while contenders take turns.
        env = {"SIRTAKI_REGISTRY": str(Path(folder) / "registry.db"), "SIRTAKI_FREEZE_AFTER": "0"}
        options = {"told": str(told), "width": scene.width, "budget": scene.budget, "tuning_s": scene.tuning_s}
        with reading(told) as facts:
            try:
                say("  1 of 2: a job tunes while it trains")
                with_log = {**env, "SIRTAKI_TRIAL_LOG": str(log)}
                tuned = run_ranks("bench.demo", where, options, env=with_log, timeout_s=JOB_TIMEOUT_S)
                results["tuned"] = tuned
                say(f"    kept after {counted(tuned['steps'], 'step')}: {tuned['setting']} ({tuned['reason']})")
                say("  2 of 2: DDP, Sirtaki untuned, tuned and remembered take turns in one job")
                options |= {"knobs": tuned["knobs"], "budget": tuned["budget"]}
                options |= {"block": scene.block, "turns_s": scene.turns_s}
                results |= run_ranks("bench.demo", where, options, env=env, timeout_s=JOB_TIMEOUT_S)
            except RuntimeError as err:
                results["problem"] = str(err).strip().splitlines()[0]
        results.setdefault("samples", facts.get("samples", {}))
        if log.exists() and "tuned" in results:
            REPORTS.mkdir(parents=True, exist_ok=True)
            write_report(log, REPORTS / f"{scene.name}.html")
    return results


def compared(samples: Mapping[str, Sequence[float]], name: str, peer: str) -> str:
    """Describe how much faster a contender is than its peer, if a paired comparison of their turns shows a difference.

    Returns:
        `1.41× as fast, 1.31 to 1.52`, or `no difference measured` with the reason: the 95 % interval contains 1, or the
        measurements cannot be trusted.
    """
    n_pairs = min(len(samples[name]), len(samples[peer]))
    if n_pairs < FEWEST_PAIRS:
        return f"no difference measured ({counted(n_pairs, 'round')}, {FEWEST_PAIRS} are needed)"
    pairs = PairedComparison.of(samples[peer][:n_pairs], samples[name][:n_pairs])
    limits = f"{pairs.gain.low:.2f} to {pairs.gain.high:.2f}"
    if pairs.gain.low <= 1.0 <= pairs.gain.high:
        return f"no difference measured ({limits})"
    if pairs.doubt:
        return f"no difference measured ({pairs.doubt})"
    return f"{pairs.gain.times:.2f}× as fast, {limits}"


def step_time(times_s: Sequence[float]) -> str:
    """Format the Hodges–Lehmann estimate of step times, and its 95 % interval: `14.7 ms, 13.9 to 16.2`."""
    middle, low, high = map(math.exp, interval([math.log(seconds) for seconds in times_s], ONLY_LOOK))
    return f"{in_ms(middle)}, {in_ms(low).removesuffix(' ms')} to {in_ms(high).removesuffix(' ms')}"


def show(scene: Scene, results: Mapping[str, Any]) -> None:
    """Print the table of one scene, the setting of the remembered job, and the path of the report."""
    samples, tuned = results["samples"], results.get("tuned")
    say()
    if any(samples.values()):
        table = Table(title=scene.title, title_justify="left", box=None, pad_edge=False)
        for heading in ("", "step, 95 % interval", "speed against DDP"):
            table.add_column(heading, no_wrap=True)
        for name, times_s in samples.items():
            table.add_row(name, step_time(times_s), "" if name == DDP else compared(samples, name, DDP))
        say(table)
        for name in (TUNED, REMEMBERED):
            say(f"{name}, against untuned: {compared(samples, name, UNTUNED)}")
        rounds = counted(len(samples[DDP]), "round")
        say(f"{rounds} of alternating turns in the same processes; intervals of paired comparisons.")
    if tuned is not None:
        say(f"Tuned: {tuned['setting']}, after {counted(tuned['steps'], 'step')} ({tuned['reason']}).")
    if tuned is not None and "settings" in results:
        runs = results["settings"][REMEMBERED]
        same = "the same setting" if runs == tuned["setting"] else f"another setting, {runs}"
        say(f"Remembered: {same}, after {counted(results['steps'], 'step')} ({results['reason']}).")
    if tuned is not None:
        say(f"Tuning report: {os.path.relpath(REPORTS / f'{scene.name}.html')}")
    if "problem" in results:
        load = f"The load of this machine is {os.getloadavg()[0]:.1f} on {counted(os.cpu_count() or 1, 'core')}."
        say(f"Incomplete: {results['problem']}. {load}")
        say("If other processes use it, end them, and run `make demo` again.")


def run_nodes() -> tuple[dict[str, Any] | None, str]:
    """Return the results of the emulated cluster, or None and the reason. Without root, a user namespace is used."""
    prefix: list[str] = []
    if shutil.which("setpriv") is None:
        return None, "not installed: setpriv (package util-linux)"
    if os.geteuid() != 0:
        prefix = ["unshare", "--user", "--map-root-user", "--kill-child", "--fork"]
        if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
            return None, "network namespaces need root, or user namespaces, which this system does not permit"
    with tempfile.TemporaryDirectory(prefix="sirtaki-demo-") as folder:
        found = Path(folder) / "found.json"
        # The kernel kills the child process, and with it all namespaces, as soon as this process ends.
        command = ["setpriv", "--pdeathsig", "KILL", *prefix, sys.executable, "-m", "bench.demo", "--nodes", str(found)]
        subprocess.run(command, cwd=REPOSITORY, check=False)
        outcome = json.loads(found.read_text()) if found.exists() else {"problem": "its process ended early"}
    return outcome.get("results"), outcome.get("problem", "")


def main() -> int:
    """Run both scenes, or, in a separate process, the scene of the emulated nodes."""
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--nodes", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = flags.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # End as with Ctrl-C, so that the namespaces are removed.
    if args.nodes is not None:
        outcome: dict[str, Any]
        try:
            reason = why_unavailable()
            if reason is not None:
                outcome = {"problem": reason}
            else:
                with NetLab(SHAPE) as lab:
                    outcome = {"results": run_scene(NODES, lab)}
        except (LabError, OSError) as err:
            outcome = {"problem": str(err).strip().splitlines()[0]}
        except KeyboardInterrupt:
            return 130
        args.nodes.write_text(json.dumps(outcome))
        return 0
    try:
        say(f"One host: 2 ranks train a network with layers of width {HOST.width}.")
        on_host = run_scene(HOST, 2)
        show(HOST, on_host)
        say(f"\nFour nodes, emulated by network namespaces: the same training with layers of width {NODES.width}.")
        on_nodes, problem = run_nodes()
    except KeyboardInterrupt:
        say("interrupted; all processes and namespaces are removed")
        return 130
    if on_nodes is not None:
        show(NODES, on_nodes)
    else:
        say(f"\nSkipped: the emulated nodes, on which tuning gains most: {problem}.")
    say("Not shown: GPUs and real networks.")
    return 1 if "problem" in on_host else 0


if __name__ == "__main__":
    sys.exit(start(main, on_rank, init=False))
