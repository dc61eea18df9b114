"""An optimizer that averages, where there is nobody to average with."""

from typing import Any

import pytest
import torch

from sirtaki.errors import NotInitializedError
from sirtaki.torch.collectives import Average
from sirtaki.torch.lasting_optimizers import derive
from sirtaki.torch.optimizer import AveragingOptimizer, GradientRecipe
from sirtaki.torch.process_sets import global_process_set


@pytest.fixture
def optimizer() -> Any:
    param = torch.nn.Parameter(torch.ones(2))
    made = derive(AveragingOptimizer, torch.optim.SGD([param], lr=0.5))
    made._begin(
        GradientRecipe(
            named=[("param", param)],
            compression={},
            passes=1,
            op=Average,
            predivide=1.0,
            sparse_as_dense=False,
            groups=(),
            arms=None,
            process_set=global_process_set,
        )
    )
    param.sum().backward()
    return made


def test_alone_it_steps_as_the_wrapped_one_and_has_nothing_to_finish(optimizer: Any) -> None:
    optimizer.step()
    optimizer.finish()
    (param,) = optimizer.param_groups[0]["params"]
    assert param.tolist() == [0.5, 0.5]
    optimizer.zero_grad()
    assert param.grad is None


def test_synchronize_before_step_wants_skip_synchronize(optimizer: Any) -> None:
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


def test_closed_or_detached_it_says_so(optimizer: Any) -> None:
    optimizer._detach("its ranks are gone")
    with pytest.raises(NotInitializedError, match="its ranks are gone"):
        optimizer.step()
    optimizer.close()
    with pytest.raises(NotInitializedError, match=r"by close\(\)"):
        optimizer.step()
    with pytest.raises(ValueError, match="must be > 0"):
        optimizer.set_backward_passes_per_step(0)
