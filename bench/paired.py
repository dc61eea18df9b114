"""Simulate how often a paired comparison is wrong, and how often it finds a true gain. Starts no ranks.

    python -m bench.paired [--runs 4000] [--check]

Two settings are measured in alternating order, and `sirtaki.autotune.paired` judges them after 6 and after 24 pairs.
Four kinds of noise: normal; normal with 5 % outliers that take three times as long; Student's t with two degrees of
freedom, which has no variance; and a neighbour that makes everything take 1.4 times as long in spells of four
iterations on average. The scale of the noise is 4 % without a gain, and 2 or 5 % with one.
Bar: without a gain at most 4 % of comparisons call one setting faster (designed for 3 %).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bench.lib.harness import Report, finish, parser
from sirtaki.autotune.paired import PairedComparison, Verdict

Noise = Callable[[np.random.Generator, int, float], npt.NDArray[np.float64]]
"""A function from a generator, a number of pairs and a scale to log(measured / true time), `(2 n_pairs,)`, in order."""

LOOKS = (6, 24)
GAINS, SCALES = (0.01, 0.02, 0.05, 0.10), (0.02, 0.05)
SCALE_WITHOUT_GAIN = 0.04
SPELL_ENDS = 0.25
"""Probability that a spell of the neighbour begins or ends, per iteration."""


def _normal(rng: np.random.Generator, n_pairs: int, scale: float) -> npt.NDArray[np.float64]:
    return scale * rng.standard_normal(2 * n_pairs)


def _outliers(rng: np.random.Generator, n_pairs: int, scale: float) -> npt.NDArray[np.float64]:
    return _normal(rng, n_pairs, scale) + math.log(3.0) * (rng.random(2 * n_pairs) < 0.05)


def _student(rng: np.random.Generator, n_pairs: int, scale: float) -> npt.NDArray[np.float64]:
    return scale * rng.standard_t(2, 2 * n_pairs)


def _spells(rng: np.random.Generator, n_pairs: int, scale: float) -> npt.NDArray[np.float64]:
    # A pair takes three iterations, because the first one after a change of the setting is not measured.
    changes = rng.random((n_pairs, 3)) < SPELL_ENDS
    slow = (np.cumsum(changes) + rng.integers(2)) % 2 == 1
    slowed: npt.NDArray[np.float64] = math.log(1.4) * slow.reshape(n_pairs, 3)[:, [0, 2]].ravel()
    return _normal(rng, n_pairs, scale) + slowed


NOISES: dict[str, Noise] = {
    "normal": _normal,
    "5 % outliers": _outliers,
    "t, 2 degrees": _student,
    "neighbour in spells": _spells,
}


def compare(rng: np.random.Generator, noise: Noise, *, scale: float, gain: float = 0.0) -> PairedComparison:
    """Return a finished comparison of a baseline and a candidate that is faster by the share `gain`."""
    errors = noise(rng, LOOKS[-1], scale).reshape(-1, 2)
    pairs = PairedComparison(looks=LOOKS)
    while pairs.verdict is Verdict.OPEN:
        first, second = errors[pairs.n_pairs]
        baseline, candidate = (first, second) if pairs.n_pairs % 2 == 0 else (second, first)
        pairs.add(math.exp(baseline), math.exp(candidate) / (1.0 + gain))
    return pairs


def summarise(noise: str, runs: int, *, seed: int, scale: float, gain: float = 0.0) -> tuple[float, float]:
    """Return the share of comparisons that prove a gain, and the mean number of pairs."""
    rng = np.random.default_rng(seed)
    compared = [compare(rng, NOISES[noise], scale=scale, gain=gain) for _ in range(runs)]
    proved = sum(pairs.verdict is Verdict.FASTER for pairs in compared)
    return proved / runs, sum(pairs.n_pairs for pairs in compared) / runs


def main() -> int:
    """Simulate all noises, gains and scales."""
    flags = parser(__doc__)
    flags.add_argument(
        "--runs", type=int, default=4000, help="comparisons per noise without a gain; with a gain, a quarter of it"
    )
    args = flags.parse_args()
    runs = args.runs // 4 if args.quick else args.runs
    report = Report(name="paired")
    cases = [(0.0, SCALE_WITHOUT_GAIN), *((gain, scale) for gain in GAINS for scale in SCALES)]
    for gain, scale in cases:
        row: dict[str, object] = {"gain": f"{100 * gain:g} %", "scale": f"{100 * scale:g} %"}
        for noise in NOISES:
            share, n_pairs = summarise(noise, runs // 4 if gain else runs, seed=args.seed, scale=scale, gain=gain)
            row[noise] = f"{100 * share:.1f} % ({n_pairs:.0f} pairs)"
            if not gain:
                report.bar(f"{noise}: comparisons that call an equal setting faster, %", 100 * share, 4.0)
        report.rows.append(row)
    return finish(report, args)


if __name__ == "__main__":
    sys.exit(main())
