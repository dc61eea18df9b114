"""The best plan of a small layout by exhaustive search, to evaluate planners and searches."""

from itertools import product

from sirtaki.autotune.knobs import Cut
from sirtaki.autotune.model.simulator import Simulator


def all_group_ends(n_gradients):
    """Yield every division of gradients into groups of consecutive ones, as the ends of the groups."""
    for inner in product((False, True), repeat=n_gradients - 1):
        yield [*(i + 1 for i, cut in enumerate(inner) if cut), n_gradients]


def all_stream_choices(n_units, streams):
    """Yield every assignment of units to streams, up to permutations of the streams."""

    def extend(chosen, used):
        if len(chosen) == n_units:
            yield tuple(chosen)
            return
        for stream in range(min(used + 1, streams)):
            yield from extend([*chosen, stream], max(used, stream + 1))

    return extend([], 0)


def best_span_s(model, route, *, streams):
    """Return the shortest span of all plans whose units end where gradients end."""
    simulator: Simulator = model.simulator(route)
    offsets = model.layout.offsets
    best = float("inf")
    for ends in all_group_ends(len(model.layout.sizes)):
        stops = sorted({offsets[end] for end in ends} - {0})
        for choice in all_stream_choices(len(stops), streams):
            cuts = tuple(Cut(stop=stop, stream=stream) for stop, stream in zip(stops, choice, strict=True))
            best = min(best, simulator.run_cuts(cuts).span_s)
    return best
