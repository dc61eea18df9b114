"""Whole scripts, drawn at random, train, print and write as one process does, or their translation says what differs.

Scripts are run as they are and, translated, on 2 and 3 ranks, in float64: values may differ by the order of sums.
"""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_scripts import drawn
from playing_jobs import play

from sirtaki.errors import TranslationError
from sirtaki.integrations.translate import Translation
from sirtaki.integrations.translate import translate as uncached_translate

pytestmark = pytest.mark.timeout(900)

SAID = {
    "is not seen to be a mean or sum": {"parameters", "numbers", "files", "an error"},  # the script's own, of a loss
    "is shown as rank 0 has it": {"numbers"},
    "is each rank's own": {"numbers"},
    "taken for all the data": {"an error"},
}
"""Differences that the translation's notes announce."""

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+")
TOGETHER = 40
"""Scripts that are run by one start of the ranks."""


@functools.cache
def translate(seed: int) -> Translation | None:
    """Return the translation of a random script; None if it is rejected with line and reason."""
    try:
        return uncached_translate(drawn(seed))
    except TranslationError as err:
        line, reason = err.obstacles[0]
        assert line > 0, reason
        return None


def alike(one: object, other: object) -> bool:
    """Return whether two trees of tensors and numbers are equal up to the order of sums."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-8, atol=1e-10)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, int | float):
        return abs(one - other) <= 2e-6 + 1e-7 * abs(one)
    return one == other


def differences(before: dict[str, Any], after: list[dict[str, Any]], folders: tuple[Path, Path]) -> set[str]:
    """Describe how a script acted differently on several ranks."""
    numbers = [[float(word) for word in NUMBER.findall(there["printed"])] for there in (before, after[0])]
    trained = after[0]["trained"][: len(before["trained"])]  # a distributed optimizer is made of the same ones again
    found = set()
    if not before["trained"] or not alike(before["trained"], trained):
        found.add("parameters")
    if not alike(*numbers):
        found.add("numbers")
    if any(there["written"] or there["printed"] for there in after[1:]):
        found.add("output of other ranks")
    pairs = (pair for there in after[1:] for pair in zip(after[0]["trained"], there["trained"], strict=True))
    if not all(torch.equal(*pair) for pair in pairs):
        found.add("ranks")
    if before["written"] != after[0]["written"]:
        found.add("names of files")
    elif not all(alike(contents(folders[0] / name), contents(folders[1] / name)) for name in set(before["written"])):
        found.add("files")
    return found


def load(folder: Path, seed: int, rank: int) -> dict[str, Any]:
    """Return a script's results on a rank."""
    found: dict[str, Any] = torch.load(folder / f"{seed}.{rank}.pt", weights_only=False)
    return found


def contents(path: Path) -> object:
    """Tensors of a checkpoint, numbers of a text."""
    if path.suffix == ".pt":
        return torch.load(path, weights_only=False)
    return [float(word) for word in NUMBER.findall(path.read_text())]


def found_in(folder: Path, seeds: range, mpiexec: list[str], several: tuple[int, ...] = (2, 3)) -> dict[int, set[str]]:
    """Return each script's unannounced differences; "refused" if it was rejected."""
    found: dict[int, set[str]] = {}
    for begin in range(seeds.start, seeds.stop, TOGETHER):
        part = list(range(begin, min(begin + TOGETHER, seeds.stop)))
        promised = {seed: done for seed in part if (done := translate(seed)) is not None}
        found |= {seed: {"refused"} for seed in part if seed not in promised}
        jobs = folder / str(begin)
        for ranks in (1, *several):
            code = jobs / f"code-{ranks}"
            code.mkdir(parents=True)
            for seed, done in promised.items():
                (code / f"{seed}.py").write_text(done.before if ranks == 1 else done.after)
            play(jobs / str(ranks), ranks, [code / f"{seed}.py" for seed in promised], mpiexec)
        for seed, done in promised.items():
            said = set().union(*(may for text, may in SAID.items() if any(text in note for _, note in done.notes)))
            before, found[seed] = load(jobs / "1", seed, 0), set()
            assert before["error"] == "", before["error"]
            for ranks in several:
                after = [load(jobs / str(ranks), seed, rank) for rank in range(ranks)]
                folders = jobs / "1" / str(seed), jobs / str(ranks) / str(seed)
                ended = not any(there["error"] for there in after)
                found[seed] |= (differences(before, after, folders) if ended else {"an error"}) - said
    return found


def test_translated_drawn_scripts_act_like_one_process(tmp_path: Path, mpiexec: list[str]) -> None:
    assert not set().union(*found_in(tmp_path, range(3, 9), mpiexec, (3,)).values())


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(1000, 1300, 60))
def test_many_translated_drawn_scripts_act_like_one_process(begin: int, tmp_path: Path, mpiexec: list[str]) -> None:
    found = found_in(tmp_path, range(begin, begin + 60), mpiexec)
    refused = [seed for seed, differs in found.items() if differs == {"refused"}]
    assert len(refused) < 10
    assert {seed: differs for seed, differs in found.items() if differs and seed not in refused} == {}
