"""What passes propose, on positions made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint

import pytest
from fakes.drawn_jobs import CHOICES
from fakes.played_jobs import GLOO
from fakes.replays import over_a_link

from sirtaki.analysis import plan_search as module
from sirtaki.analysis import plan_search as other_passes
from sirtaki.analysis.plan_search import (
    BF16,
    Candidate,
    Change,
    Choices,
    Position,
    Schedule,
    Tensor,
    bf16,
    fuse,
    partition,
    passes,
    routes,
    split,
    streams,
)
from sirtaki.autotune.model.replayer import Activity
from sirtaki.comm.plan import GradientLayout
from sirtaki.errors import ConfigError

TENSORS = (Tensor(stop=1000), Tensor(stop=3000), Tensor(stop=6000, parts=2))

CANDIDATE = Candidate(schedule=Schedule(route=GLOO, streams=2, unit_bytes=4000, tensors=TENSORS))


@dataclass
class Place(Position):
    """A position: a start-up of 1 s, and 1 s for 1000 elements on one of two streams; best in as many parts as told."""

    ends_s: tuple[float, ...] = (2.0, 4.0, 9.0)
    readies_s: tuple[float, ...] = (0.0, 1.0, 5.0)
    parts: int = 1
    layout: GradientLayout = field(default_factory=lambda: GradientLayout(sizes=(1000, 2000, 1500, 1500)))
    choices: Choices = CHOICES
    candidate: Candidate = CANDIDATE
    tensors: tuple[Tensor, ...] = TENSORS

    def n_bytes(self, tensor: int) -> int:
        return 4 * (TENSORS[tensor].stop - (TENSORS[tensor - 1].stop if tensor else 0))

    def ready_s(self, tensor: int) -> float:
        return self.readies_s[tensor]

    def end_s(self, tensor: int) -> float:
        return self.ends_s[tensor]

    def best_parts(self, n_bytes: int) -> tuple[int, float]:
        return self.parts, 1.0 + n_bytes / 4000


def stops(change: Change, place: Place) -> list[tuple[int, int]]:
    after = change.apply(place.candidate)
    assert after is not None
    return [(tensor.stop, tensor.parts) for tensor in after.schedule.tensors_of(place.layout)]


def test_a_tensor_joins_the_one_before_it_if_that_ends_later_than_both_take_longer() -> None:
    # Theorem 2: tensor 1 is ready at 1 s; both take 4 s, it alone 3 s. So the end of tensor 0 has to be behind 2 s.
    assert list(fuse(Place(ends_s=(2.0, 4.0, 9.0)), 1)) == []
    place = Place(ends_s=(2.1, 4.0, 9.0))
    (change,) = fuse(place, 1)
    assert stops(change, place) == [(3000, 1), (6000, 2)]
    assert list(fuse(place, 0)) == []


def test_a_fused_tensor_has_its_best_number_of_parts() -> None:
    place = Place(ends_s=(2.1, 4.0, 9.0), parts=3)
    (change,) = fuse(place, 1)
    assert stops(change, place) == [(3000, 3), (6000, 2)]


def test_a_tensor_is_parted_as_is_best_or_not_at_all() -> None:
    place = Place(parts=4)
    changes = list(partition(place, 2))
    assert [stops(change, place)[2] for change in changes] == [(6000, 4), (6000, 1)]
    assert len(list(partition(place, 0))) == 1
    assert changes[0].alike != changes[1].alike


def test_a_tensor_of_several_gradients_is_split_at_the_one_nearest_to_its_middle() -> None:
    place = Place()
    (change,) = split(place, 2)
    assert stops(change, place) == [(1000, 1), (3000, 1), (4500, 1), (6000, 1)]
    assert list(split(place, 1)) == []


def test_every_number_of_streams_and_every_route_is_tried() -> None:
    place = Place()
    found = [change.apply(place.candidate) for change in streams(place, 0)]
    assert [one.schedule.streams for one in found if one is not None] == [1, 2, 3, 4]
    (by_route,) = routes(place, 0)
    assert by_route.apply(place.candidate) == place.candidate


def test_bf16_halves_what_units_carry_once() -> None:
    place = Place()
    (change,) = bf16(place, 0)
    after = change.apply(place.candidate)
    assert after is not None
    assert after.extras == (BF16,)
    assert change.apply(after) is None
    job = over_a_link()
    halved = BF16.apply(job)
    for one, other in zip(job.iterations[0].operations, halved.iterations[0].operations, strict=True):
        assert one.activity is Activity.UNIT
        assert other.link_s == pytest.approx(one.link_s / 2)
    other = replace(place, layout=GradientLayout(sizes=(6000,), itemsize_bytes=2, dtype="bfloat16"))
    assert list(bf16(other, 0)) == []


def test_what_changes_numbers_is_used_only_by_name() -> None:
    assert "bf16" not in {one.name for one in passes()}
    assert "bf16" in {one.name for one in passes(["bf16"])}
    with pytest.raises(ConfigError, match="there is no pass 'fp4'; there are tensor-fusion"):
        passes(["fp4"])


class Mine:
    name = "mine"
    changes_numbers = False

    def changes(self, position: Position, tensor: int) -> Iterator[Change]:
        yield from ()


def test_other_packages_bring_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def brought(value: str) -> None:
        point = EntryPoint(name="mine", group=module.ENTRY_POINT_GROUP, value=value)
        monkeypatch.setattr(other_passes, "entry_points", lambda group: [point])

    monkeypatch.setattr(module, "mine", Mine, raising=False)
    brought("sirtaki.analysis.plan_search:mine")
    assert passes()[-1].name == "mine"
    brought("sirtaki.analysis.plan_search:nothing")
    with pytest.raises(ConfigError, match="'mine' could not be built"):
        passes()
    brought("builtins:object")
    with pytest.raises(ConfigError, match="'mine' is none: it has no name, changes_numbers, changes"):
        passes()
