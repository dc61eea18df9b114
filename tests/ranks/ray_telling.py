"""Ranks whose processes survive an exception of their function. Peers learn of it, and all ranks can start again."""

import os

import torch

import sirtaki.torch as hvd
from sirtaki.errors import PeerLostError
from sirtaki.integrations.ray.ranks import call_reporting_errors, leave_job


def fail_on_the_last_rank() -> None:
    hvd.init()
    if hvd.rank() == hvd.size() - 1:
        raise LookupError("nothing")
    while True:
        hvd.allreduce(torch.ones(3))


def add_ranks() -> float:
    hvd.init()
    return float(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum))


def main() -> None:
    rank, size, said = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), ""
    assert call_reporting_errors(lambda: 3) == 3  # before a job exists
    try:
        call_reporting_errors(fail_on_the_last_rank)
    except (LookupError, PeerLostError) as err:
        said = f"{type(err).__name__}: {err}"
    last = rank == size - 1
    assert said == ("LookupError: nothing" if last else "PeerLostError: a rank raised LookupError: nothing"), said
    assert not hvd.is_initialized()
    leave_job("again is harmless")
    assert call_reporting_errors(add_ranks) == size * (size + 1) / 2
    assert hvd.is_initialized()
    hvd.shutdown()
    print("went on", flush=True)


main()
