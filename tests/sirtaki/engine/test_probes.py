"""What the warm-up measures of a route before the planners plan."""

from conftest import RunRanks

from sirtaki.engine.tuning.probes import LEAST_LARGE_BYTES, NEEDED_FIRST, PASSES, SHAPES, STREAM_BYTES


def shapes_of(output: str) -> list[list[tuple[int, ...]]]:
    """Of each rank: bytes, streams and rounds of its probes."""
    lines = sorted(output.splitlines())
    return [[tuple(map(int, probe.split("x"))) for probe in line.split()[1:]] for line in lines]


def test_ranks_with_different_budgets_take_the_same_probes(run_ranks: RunRanks) -> None:
    stingy, generous = shapes_of(run_ranks("probes.py", 2, 0.0, 100.0).stdout)
    assert stingy == generous
    least = [(min(unit_bytes, LEAST_LARGE_BYTES), streams) for unit_bytes, streams in SHAPES[:NEEDED_FIRST]]
    assert [probe[:2] for probe in stingy] == least


def test_every_stream_carries_as_much_in_every_probe(run_ranks: RunRanks) -> None:
    probes, _ = shapes_of(run_ranks("probes.py", 2, 100.0, 100.0).stdout)
    assert {probe[:2] for probe in probes} == {shape for shape in SHAPES if shape[1] <= 4}
    assert {unit_bytes * rounds for unit_bytes, _, rounds in probes} == {PASSES * STREAM_BYTES}
