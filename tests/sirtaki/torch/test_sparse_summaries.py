"""Scripts hear how their sparse gradients travel."""

import pytest

import sirtaki.torch as hvd
from sirtaki.errors import NotInitializedError


def test_without_a_job_there_is_nothing_to_tell() -> None:
    with pytest.raises(NotInitializedError):
        hvd.sparse_gradients()
