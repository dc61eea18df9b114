"""Of two committed copies one is whole at any moment, and no tensor is allocated twice."""

import collections

import pytest
import torch

from sirtaki.torch.elastic.state import Commits, copied


class Refuses:
    def __deepcopy__(self, memo: object) -> None:
        raise MemoryError


def test_what_fails_while_it_is_written_leaves_the_one_before() -> None:
    commits = Commits()
    commits.write({"a": torch.tensor([1.0]), "b": 1})
    commits.write({"a": torch.tensor([2.0]), "b": 2})
    with pytest.raises(MemoryError):
        commits.write({"a": torch.tensor([3.0]), "b": Refuses()})
    assert commits.newest.number == 1
    assert (commits.newest.tree["a"].item(), commits.newest.tree["b"]) == (2.0, 2)


def test_tensors_of_the_next_but_one_lie_where_the_first_lay() -> None:
    commits, weight = Commits(), torch.zeros(3)
    places = []
    for number in range(4):
        weight += 1
        places.append(commits.write({"weight": weight}).tree["weight"].data_ptr())
        assert commits.newest.tree["weight"].tolist() == [number + 1.0] * 3
    assert places[:2] == places[2:]
    assert len({*places, weight.data_ptr()}) == 3


def test_a_commit_that_not_all_hold_is_dropped_where_the_one_before_is_held() -> None:
    commits = Commits()
    for value in range(3):
        commits.write({"value": value})
    commits.drop_after(1)
    assert commits.newest.tree["value"] == 1
    commits.drop_after(0)  # which is not here any more
    assert commits.newest.tree["value"] == 1
    commits.count_from(7)
    assert commits.write({"value": 5}).number == 7
    assert commits.newest.tree["value"] == 5


def test_copies_are_of_their_own_types_and_share_nothing() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    tree = {"model": state, "list": [torch.ones(2), {"deep": (1, torch.zeros(1))}], "channels": torch.zeros(1, 2, 3, 4)}
    tree["channels"] = tree["channels"].to(memory_format=torch.channels_last)
    before = copied(tree)
    state["weight"].fill_(9.0)
    tree["list"][0].fill_(9.0)
    assert before["model"]["weight"].tolist() == [1.0, 1.0]
    assert before["list"][0].tolist() == [1.0, 1.0]
    assert isinstance(before["model"], collections.OrderedDict)
    assert before["model"]._metadata == state._metadata  # type: ignore[attr-defined]
    assert before["channels"].stride() == tree["channels"].stride()
    again = copied({"model": {"weight": torch.ones(5)}, "list": [1]}, before)  # of other shapes
    assert again["model"]["weight"].shape == (5,)
    assert again["list"] == [1]
