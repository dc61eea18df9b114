"""Generators of random numbers go on where they were."""

import random

import numpy as np
import torch

from sirtaki.torch.elastic.checkpoints import RandomState


def test_random_generators_go_on_where_they_were() -> None:
    now = RandomState.now()
    drawn = [random.random(), np.random.random(), torch.rand(1).item()]
    now.put_back()
    assert [random.random(), np.random.random(), torch.rand(1).item()] == drawn
