"""An optimizer of a derived class shares groups and state with the one it was made of, and is copied as a plain one."""

import copy
import pickle
from typing import Any

import pytest
import torch

from sirtaki.errors import ConfigError
from sirtaki.torch.lasting_optimizers import Distributed, derive, require_plain


class Mixin(Distributed):
    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure)


@pytest.fixture
def param() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


def test_it_is_both_and_named_like_the_one_it_was_made_of(param: torch.nn.Parameter) -> None:
    plain = torch.optim.SGD([param], lr=0.5, momentum=0.9)
    derived: Any = derive(Mixin, plain)
    assert isinstance(derived, torch.optim.SGD)
    assert isinstance(derived, Distributed)
    assert type(derived).__name__ == "SGD"
    assert derived._wrapped is plain


def test_groups_and_state_are_the_same_objects(param: torch.nn.Parameter) -> None:
    plain = torch.optim.SGD([param], lr=0.5, momentum=0.9)
    derived: Any = derive(Mixin, plain)
    derived.step()
    assert param.tolist() == [0.5, 0.5]
    assert plain.state[param]["momentum_buffer"].tolist() == [1.0, 1.0]
    plain.param_groups[0]["lr"] = 0.25
    assert derived.param_groups[0]["lr"] == 0.25
    assert derived.steps == 1
    assert not hasattr(plain, "steps")


def test_a_schedulers_patch_of_the_wrapped_ones_step_does_not_hide_ours(param: torch.nn.Parameter) -> None:
    plain = torch.optim.SGD([param], lr=0.5)
    torch.optim.lr_scheduler.StepLR(plain, 1)
    assert "step" in vars(plain)
    derived: Any = derive(Mixin, plain)
    derived.step()
    assert derived.steps == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies_are_plain_and_independent(duplicate: Any, param: torch.nn.Parameter) -> None:
    derived: Any = derive(Mixin, torch.optim.SGD([param], lr=0.5, momentum=0.9))
    derived.step()
    made = duplicate(derived)
    assert type(made) is torch.optim.SGD
    (own,) = made.param_groups[0]["params"]
    assert own is not param
    assert made.state[own]["momentum_buffer"].tolist() == [1.0, 1.0]
    own.grad = torch.zeros(2)
    made.step()
    assert param.tolist() == [0.5, 0.5]


def test_what_is_distributed_already_is_refused_with_what_to_do(param: torch.nn.Parameter) -> None:
    plain = torch.optim.Adam([param])
    require_plain(plain)
    with pytest.raises(
        ConfigError, match=r"this Adam is a DistributedOptimizer already.*make another torch.optim.Adam"
    ):
        require_plain(derive(Mixin, plain))
