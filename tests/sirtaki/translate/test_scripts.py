"""Twenty-one scripts in the styles of different people train equally before and after they are translated.

On one rank what a script prints and trains is the same to the last bit. On two ranks the batches are the same, so they
differ by the order of sums only, but where noise, dropout or batch norm depend on which rank a sample is on.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from playing_jobs import left, play

from sirtaki.errors import TranslationError
from sirtaki.translate import Translation
from sirtaki.translate import translate as uncached_translate

translate: Callable[[str], Translation] = functools.cache(uncached_translate)

HERE = Path(__file__).parent
SCRIPTS = sorted((HERE / "scripts").glob("*.py"))
REFUSED = {"spawned_ddp"}
SEVERAL_BEFORE = {"ddp_script", "horovod_script"}
"""Scripts that are for several ranks before they are translated: a batch is a rank's."""

OWN_NOISE = {"gan", "vae", "early_stopping"}
"""Scripts whose ranks draw noise or have statistics of their own."""

pytestmark = pytest.mark.timeout(600)  # the first slow test waits for four jobs of twenty scripts each

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?|-?\d+")


def names() -> list[str]:
    return [script.stem for script in SCRIPTS if script.stem not in REFUSED]


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.stem not in REFUSED], ids=lambda p: p.stem)
def test_a_translated_script_is_not_translated_again(script: Path) -> None:
    once = translate(script.read_text())
    assert once.after != once.before
    assert once.diff("train.py").startswith("--- train.py\n+++ train.py\n")
    twice = translate(once.after)
    assert twice.after == once.after
    assert twice.diff("train.py") == ""


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.stem not in REFUSED], ids=lambda p: p.stem)
def test_a_divided_loader_has_its_epoch_set(script: Path) -> None:
    after = translate(script.read_text()).after
    assert after.count("divided(") == 0 or "sampler.set_epoch(" in after


def test_nearly_all_are_translated_and_the_others_refused_with_line_and_reason() -> None:
    assert len(SCRIPTS) >= 20
    assert len(REFUSED) <= 2
    for name in REFUSED:
        with pytest.raises(TranslationError, match=r"^line \d+: .{20}"):
            translate((HERE / "scripts" / f"{name}.py").read_text())


@dataclass(frozen=True)
class Played:
    """What scripts have left, by name and rank: before on one rank, after on one, after on two; before on two."""

    before: Callable[[str], dict[str, Any]]
    alone: Callable[[str], dict[str, Any]]
    two: Callable[[str, int], dict[str, Any]]
    several: Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, mpiexec: list[str]) -> Played:
    folder = tmp_path_factory.mktemp("played")
    code = folder / "code"
    code.mkdir()
    for script in SCRIPTS:
        if script.stem not in REFUSED:
            (code / script.name).write_text(translate(script.read_text()).after)
    translated = [code / f"{name}.py" for name in names()]
    originals = [HERE / "scripts" / f"{name}.py" for name in names()]
    several = [HERE / "scripts" / f"{name}.py" for name in sorted(SEVERAL_BEFORE)]
    for job, ranks, scripts in (
        ("before", 1, originals),
        ("alone", 1, translated),
        ("two", 2, translated),
        ("several", 2, several),
    ):
        play(folder / job, ranks, scripts, mpiexec)

    return Played(
        before=lambda name: left(folder / "before", name, 0),
        alone=lambda name: left(folder / "alone", name, 0),
        two=lambda name, rank: left(folder / "two", name, rank),
        several=lambda name: left(folder / "several", name, 0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_on_one_rank_a_script_trains_as_before_to_the_last_bit(played: Played, name: str) -> None:
    before, after = played.before(name), played.alone(name)
    assert after["printed"] == before["printed"] != ""
    assert before["trained"]
    for now, then in zip(after["trained"], before["trained"], strict=False):
        assert torch.equal(now, then)
    assert after["written"] == before["written"]


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_on_two_ranks_parameters_are_equal_and_one_rank_prints_and_writes(played: Played, name: str) -> None:
    root, other = (played.two(name, rank) for rank in (0, 1))
    assert root["trained"]
    for mine, others in zip(root["trained"], other["trained"], strict=True):
        assert torch.equal(mine, others)
    assert other["printed"] == ""
    assert other["written"] == []
    assert root["written"] == played.before(name)["written"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if name not in SEVERAL_BEFORE])
def test_on_two_ranks_a_script_prints_the_numbers_that_it_printed_alone(played: Played, name: str) -> None:
    before, after = played.before(name)["printed"], played.two(name, 0)["printed"]
    wanted, shown = (list(map(float, NUMBER.findall(text))) for text in (before, after))
    if name == "early_stopping":  # which may stop at another epoch
        wanted, shown = wanted[:5], shown[:5]
    tolerance = {"rel": 0.15, "abs": 0.15} if name in OWN_NOISE else {"rel": 2e-3, "abs": 2e-5}
    assert shown == pytest.approx(wanted, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEVERAL_BEFORE))
def test_a_script_for_several_ranks_prints_what_it_printed_on_as_many(played: Played, name: str) -> None:
    before, after = played.several(name), played.two(name, 0)
    wanted, shown = (list(map(float, NUMBER.findall(there["printed"]))) for there in (before, after))
    assert shown == pytest.approx(wanted, rel=1e-5)
