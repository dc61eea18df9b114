"""Two ranks whose processes go on when their functions fail: the other hears of it, and both can begin anew."""

import os

import torch

import sirtaki.torch as hvd
from sirtaki.errors import PeerLostError
from sirtaki.ray.telling import call_telling_others


def fail_on_rank_1() -> None:
    hvd.init()
    if hvd.rank() == 1:
        raise LookupError("nothing")
    while True:
        hvd.allreduce(torch.ones(3))


def add_ranks() -> float:
    hvd.init()
    return float(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum))


def main() -> None:
    rank, said = int(os.environ["RANK"]), ""
    try:
        call_telling_others(fail_on_rank_1)
    except (LookupError, PeerLostError) as err:
        said = f"{type(err).__name__}: {err}"
    assert said == ("LookupError: nothing" if rank else "PeerLostError: a rank raised LookupError: nothing"), said
    assert call_telling_others(add_ranks) == 3.0
    hvd.shutdown()
    print("went on", flush=True)


main()
