"""What a user has asked of an optimizer is known again on other ranks; where there is nobody else it makes nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from sirtaki.comm.collectives.rank_sets import RankSet
from sirtaki.settings import Settings
from sirtaki.torch.collectives import Average, Sum
from sirtaki.torch.optimizer import GradientRecipe
from sirtaki.torch.process_sets import ProcessSet, global_process_set


def recipe(*shape: int, name: str = "weight", **changes: Any) -> GradientRecipe:
    made = GradientRecipe(
        named=[(name, torch.zeros(*shape))],
        compression={},
        passes=1,
        op=Average,
        predivide=1.0,
        sparse_as_dense=False,
        groups=(),
        arms=None,
        process_set=global_process_set,
    )
    return replace(made, **changes)


def test_recipes_of_different_things_have_different_signatures() -> None:
    same = {recipe(2, 3).signature, recipe(2, 3).signature, recipe(2, 3, passes=4).signature}
    assert len(same) == 1
    others = [
        recipe(3, 2),
        recipe(2, 3, name="bias"),
        recipe(2, 3, op=Sum),
        recipe(2, 3, process_set=ProcessSet([0, 1])),
        recipe(2, 3, process_set=ProcessSet([0, 2])),
    ]
    assert len({each.signature for each in others} | same) == 1 + len(others)


def test_on_one_rank_there_is_nothing_to_make() -> None:
    alone = RankSet(number=0, ranks=(0,), comm=None, engine=None)
    current: Any = SimpleNamespace(rank_sets=[alone], settings=Settings())
    assert recipe(2).make(current) is None
