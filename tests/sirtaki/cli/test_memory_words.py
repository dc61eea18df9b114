from fakes import memories
from fakes.memories import LEFT, OUTPUT, THERE

from sirtaki.analysis.memory import Fitting, fit, memory_passes, memory_replay, peak_words
from sirtaki.cli.optimize import describe_memory, memory_as_json, unmet

WHOLE = THERE + 4 * (LEFT + OUTPUT)


def asked(budget_bytes: int, *, kind: str = "Block") -> Fitting:
    return fit(memories.recording(kind=kind), memories.job(), memory_passes(), budget_bytes=budget_bytes)


def test_a_peak_is_told_with_its_moment_and_what_for() -> None:
    rank = memories.recorded_job().ranks[0]
    replay = memory_replay(rank)
    assert peak_words(rank, replay, replay.peak()) == (
        "At its peak rank 0 holds 2.89 KiB of cpu, 3500 ms into the step (other): 1.72 KiB activations, "
        "1000 B parameters, 200 B flat buffers."
    )


def test_a_job_that_fits_is_left_alone() -> None:
    assert list(describe_memory(asked(WHOLE))) == [
        "At its peak rank 0 holds 2.89 KiB (cpu), within 2.89 KiB: nothing need be done about memory.",
        "",
    ]


def test_what_would_do_is_shown_and_the_lines_of_the_fastest() -> None:
    text = "\n".join(describe_memory(asked(WHOLE - LEFT, kind="BatchNorm2d")))
    assert "more than 2.5 KiB" in text
    assert "The fastest that fits is accumulation:" in text
    assert "    optimizer = hvd.DistributedOptimizer(optimizer, ..., backward_passes_per_step=2)" in text
    assert "re-computation of 1 module (BatchNorm2d)" in text
    assert "But: modules with running statistics" in text


def test_what_is_not_enough_is_said_to_be() -> None:
    text = "\n".join(describe_memory(asked(THERE + 210)))
    assert "re-computation of 3 modules (Block), which is not enough" in text
    assert "The fastest that fits is both:" in text


def test_a_budget_that_cannot_be_met_is_one_sentence() -> None:
    words = unmet(asked(100))
    assert words.startswith("a budget of 100 B cannot be met: a rank holds 2.89 KiB at the peak, and the least that ")
    assert ", by re-computation of " in words
    assert "\n" not in words


def test_machines_read_the_same() -> None:
    told = memory_as_json(asked(WHOLE - LEFT))
    assert (told["peak_bytes"], told["chosen"]) == (WHOLE, 0)
    assert told["remedies"][0]["by"] == "accumulation"
    assert told["remedies"][0]["peak_bytes"] <= WHOLE - LEFT
