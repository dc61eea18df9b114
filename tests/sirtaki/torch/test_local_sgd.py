"""Ranks that synchronise less often than at every step: LocalSGD and DiLoCo."""

import pytest
import torch
from rank_jobs import OVER_MESH, UNTUNED, Job, integration, played_on_ranks, slow
from torch import nn

import sirtaki.torch as hvd
from sirtaki.errors import ConfigError

test_ranks_that_synchronise_less_often_train_as_simulated = played_on_ranks(
    "local_sgd",
    Job(2, env=UNTUNED),
    integration(Job(3, "mesh", {**UNTUNED, **OVER_MESH}), but="local_sgd_averages"),
    slow(Job(1, env=UNTUNED)),
    slow(Job(4, env=UNTUNED)),
)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_every": 0}, "positive multiple"),
        ({"sync_every": 5, "fragments": 2}, "a positive multiple of the 2 fragments"),
        ({"sync_every": 4, "fragments": 2, "delay": 3}, "delay: expected 0 to 2"),
        ({"sync_every": None, "delay": 1}, "Sirtaki then tunes both"),
        ({"fragments": 0}, "positive number"),
        ({"fragments": [nn.Linear(2, 2)]}, "weight is in none of them"),
        ({"blend": 1.0}, "at least 0 and less than 1"),
        ({"outer": torch.optim.SGD}, "must be a torch.optim.Optimizer"),
        ({"outer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)}, "same tensors"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, object], words: str) -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=words):
        hvd.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 parameters that the model does not have"):
        hvd.LocalSGD(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_states_of_other_fragments_are_refused() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = hvd.LocalSGD(model, optimizer, 4, fragments=2).state_dict()
    with pytest.raises(ConfigError, match=r"2 fragments \(parts of the model\), but this hvd.LocalSGD has 1"):
        hvd.LocalSGD(model, optimizer, 4).load_state_dict(state)
