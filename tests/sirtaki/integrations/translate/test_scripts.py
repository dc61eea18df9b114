"""Twenty-one scripts in the styles of different people train equally before and after they are translated.

On one rank what a script prints and trains is the same to the last bit. On two ranks the batches are the same, so they
differ by the order of sums only, but where noise, dropout or batch norm depend on which rank a sample is on.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from playing_jobs import left, play

from sirtaki.errors import TranslationError
from sirtaki.integrations.translate import Translation
from sirtaki.integrations.translate import translate as uncached_translate

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


NAMES = [script.stem for script in SCRIPTS if script.stem not in REFUSED]


def text(name: str) -> str:
    return (HERE / "scripts" / f"{name}.py").read_text()


@pytest.mark.lengthy
@pytest.mark.parametrize("name", NAMES)
def test_a_translated_script_sets_the_epochs_of_divided_loaders_and_is_not_translated_again(name: str) -> None:
    once = translate(text(name))
    assert once.after != once.before
    assert once.diff("train.py").startswith("--- train.py\n+++ train.py\n")
    assert "divided(" not in once.after or "sampler.set_epoch(" in once.after
    twice = translate(once.after)
    assert (twice.after, twice.diff("train.py")) == (once.after, "")


def test_nearly_all_are_translated_and_the_others_rejected_with_line_and_reason() -> None:
    assert len(SCRIPTS) >= 20
    assert len(REFUSED) <= 2
    for name in REFUSED:
        with pytest.raises(TranslationError, match=r"^line \d+: .{20}"):
            translate(text(name))


Played = Callable[..., dict[str, Any]]
"""Results of a script in a job: "before" on one rank, translated "alone" and on "two", "several" before on two."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, mpiexec: list[str]) -> Played:
    folder = tmp_path_factory.mktemp("played")
    code = folder / "code"
    code.mkdir()
    for name in NAMES:
        (code / f"{name}.py").write_text(translate(text(name)).after)
    jobs = {"before": (1, HERE / "scripts", NAMES), "alone": (1, code, NAMES), "two": (2, code, NAMES),
            "several": (2, HERE / "scripts", sorted(SEVERAL_BEFORE))}  # fmt: skip
    for job, (ranks, scripts, names) in jobs.items():
        play(folder / job, ranks, [scripts / f"{name}.py" for name in names], mpiexec)
    return lambda job, name, rank=0: left(folder / job, name, rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_on_one_rank_a_script_trains_as_before_to_the_last_bit(played: Played, name: str) -> None:
    before, after = played("before", name), played("alone", name)
    assert after["printed"] == before["printed"] != ""
    assert before["trained"]
    for now, then in zip(after["trained"], before["trained"], strict=False):
        assert torch.equal(now, then)
    assert after["written"] == before["written"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_on_two_ranks_parameters_are_equal_and_one_rank_prints_and_writes(played: Played, name: str) -> None:
    root, other = (played("two", name, rank) for rank in (0, 1))
    assert root["trained"]
    for mine, others in zip(root["trained"], other["trained"], strict=True):
        assert torch.equal(mine, others)
    assert other["printed"] == ""
    assert other["written"] == []
    assert root["written"] == played("before", name)["written"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SEVERAL_BEFORE])
def test_on_two_ranks_a_script_prints_the_numbers_that_it_printed_alone(played: Played, name: str) -> None:
    before, after = played("before", name)["printed"], played("two", name)["printed"]
    wanted, shown = (list(map(float, NUMBER.findall(text))) for text in (before, after))
    if name == "early_stopping":  # which may stop at another epoch
        wanted, shown = wanted[:5], shown[:5]
    tolerance = {"rel": 0.15, "abs": 0.15} if name in OWN_NOISE else {"rel": 2e-3, "abs": 2e-5}
    assert shown == pytest.approx(wanted, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEVERAL_BEFORE))
def test_a_script_for_several_ranks_prints_the_same_on_as_many_ranks(played: Played, name: str) -> None:
    before, after = played("several", name), played("two", name)
    wanted, shown = (list(map(float, NUMBER.findall(there["printed"]))) for there in (before, after))
    assert shown == pytest.approx(wanted, rel=1e-5)
