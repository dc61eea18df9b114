"""Disagreements between ranks. Each raises an error on every rank, and the job continues.

Started by test_collectives.py.
"""

import traceback
from collections.abc import Callable

import torch

import sirtaki.torch as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
last = size - 1
odd = rank == last  # the rank that differs


def fails(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    """Check that `call` raises `kind` with `words` on this rank, and that all ranks can communicate afterwards."""
    try:
        call()
    except kind as err:
        assert words in str(err), f"{words!r} is not in {str(err)!r}"
    else:
        raise AssertionError(f"no {kind.__name__} on rank {rank}: {words}")
    assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == size


def mismatch(words: str, call: Callable[[], object]) -> None:
    """Check that `call` raises the same error on all ranks."""
    fails(hvd.HorovodInternalError, words, call)


ones = torch.ones(3)
if size > 1:
    mismatch("Mismatched ALLREDUCE tensor shapes", lambda: hvd.allreduce(torch.ones(3 + odd)))
    mismatch(
        "Mismatched ALLREDUCE tensor shapes", lambda: hvd.allreduce(torch.ones((3, 4) if odd else (4, 3)), name="x")
    )
    mismatch("Mismatched data types", lambda: hvd.allreduce(torch.ones(3, dtype=torch.int32 if odd else torch.int64)))
    mismatch("reduce operations", lambda: hvd.allreduce(ones, op=hvd.Min if odd else hvd.Sum))
    mismatch("postscale factors", lambda: hvd.allreduce(ones, op=hvd.Sum, prescale_factor=1.0 + odd))
    mismatch("Mismatched ALLGATHER tensor shapes", lambda: hvd.allgather(torch.ones(rank + 1, 2 + odd)))
    mismatch("Mismatched data types", lambda: hvd.allgather(ones.int() if odd else ones))
    mismatch("root ranks", lambda: hvd.broadcast(ones, rank))
    mismatch("Mismatched BROADCAST tensor shapes", lambda: hvd.broadcast(torch.ones(3 + odd), 0))
    mismatch("Mismatched ALLTOALL tensor shapes", lambda: hvd.alltoall(torch.ones(size, 1 + odd)))
    mismatch("Mismatched REDUCESCATTER tensor shapes", lambda: hvd.reducescatter(torch.ones(size, 1 + odd)))
    mismatch("Mismatched data types", lambda: hvd.grouped_allreduce([ones] * (2 + odd)))
    # The kind of operation and the counter of unnamed ones are part of the name, as in Horovod. Only given names clash.

    handles = [
        hvd.allreduce_async(ones, name="fine", op=hvd.Sum),
        hvd.allreduce_async(torch.ones(2 + odd), name="not fine"),
        hvd.allreduce_async(ones, name="fine, too", op=hvd.Sum),
    ]
    assert hvd.synchronize(handles[2])[0] == size
    mismatch("[2]", lambda: hvd.synchronize(handles[1]))
    assert hvd.synchronize(handles[0])[0] == size

# A rank that detects an error itself raises what Horovod would raise. Its peers get a message.
for kind, words, good, bad in (
    (IndexError, "first dimension", lambda: hvd.allgather(ones), lambda: hvd.allgather(torch.tensor(1.0))),
    (ValueError, "root_rank", lambda: hvd.broadcast(ones, 0), lambda: hvd.broadcast(ones, size)),
    (ValueError, "root_rank", lambda: hvd.broadcast_(ones, 0, name="n"), lambda: hvd.broadcast_(ones, -1, name="n")),
    (ValueError, "Sum of splits", lambda: hvd.alltoall(ones, [0] * size), lambda: hvd.alltoall(ones, [4] * size)),
    (ValueError, "one for each rank", lambda: hvd.alltoall(ones, [0] * size), lambda: hvd.alltoall(ones, [0] * 9)),
    (ValueError, "whole numbers", lambda: hvd.alltoall(ones, [0] * size), lambda: hvd.alltoall(ones, "ab")),
    (ValueError, "one for each", lambda: hvd.alltoall(ones, [0] * size), lambda: hvd.alltoall(ones, [-1] * size)),
    (ValueError, "without dimensions", lambda: hvd.alltoall(ones, [0] * size), lambda: hvd.alltoall(torch.tensor(1.0))),
    (ValueError, "cannot be reduced", lambda: hvd.allreduce(ones), lambda: hvd.allreduce(ones.bool())),
    (ValueError, "cannot be reduced", lambda: hvd.allreduce(ones), lambda: hvd.allreduce(ones * 1j, op=hvd.Min)),
    (ValueError, "cannot be reduced", lambda: hvd.allreduce(ones), lambda: hvd.allreduce(ones.int(), op=hvd.Adasum)),
    (ValueError, "op=", lambda: hvd.allreduce(ones), lambda: hvd.allreduce(ones, op=17)),
    (
        ValueError,
        "torch.float32",
        lambda: hvd.alltoall(ones, [0] * size),
        lambda: hvd.alltoall(ones, [1.0] + [0.0] * last),
    ),
    (
        ValueError,
        "torch.bool",
        lambda: hvd.alltoall(ones, [0] * size),
        lambda: hvd.alltoall(ones, torch.zeros(size) > 1),
    ),
    (NotImplementedError, "Adasum", lambda: hvd.reducescatter(ones), lambda: hvd.reducescatter(ones, op=hvd.Adasum)),
    (ValueError, "Average or", lambda: hvd.reducescatter(ones), lambda: hvd.reducescatter(ones, op=hvd.Max)),
    (ValueError, "deals out rows", lambda: hvd.reducescatter(ones), lambda: hvd.reducescatter(torch.tensor(1.0))),
    (ValueError, "sparse_allreduce_async", lambda: hvd.allreduce(ones), lambda: hvd.allreduce(ones.to_sparse())),
    (ValueError, "torch.Tensor", lambda: hvd.allreduce(ones), lambda: hvd.allreduce([1.0])),
):
    if odd:
        fails(kind, words, bad)
    else:
        mismatch(f"Rank {last} cannot take part", good)
    fails(kind, words, bad)  # and if all ranks are wrong

# A name that is in flight already is detected locally. The last rank submits it only after that attempt.
if size > 1:
    if odd:
        hvd.allreduce(ones, name="gate")
        handle = hvd.allreduce_async(ones, name="twice", op=hvd.Sum)
    else:
        handle = hvd.allreduce_async(ones, name="twice", op=hvd.Sum)
        try:
            hvd.allreduce_async(ones, name="twice")
        except ValueError as err:
            assert "same name" in str(err)
        else:
            raise AssertionError("a name twice in flight")
        assert not hvd.poll(handle)
        hvd.allreduce(ones, name="gate")
    assert hvd.synchronize(handle)[0] == size

# Some ranks fail before the last one has submitted anything. It must then take part in as many failed operations.
if size > 2:
    for _attempt in range(3):
        if not odd:
            try:
                hvd.allreduce(torch.ones(2 + rank), name="owed")
            except hvd.HorovodInternalError as err:
                assert "shapes" in str(err)
            else:
                raise AssertionError("different shapes were reduced")
    if odd:
        for _attempt in range(3):
            try:
                hvd.allreduce(torch.ones(2), name="owed")
            except hvd.HorovodInternalError as err:
                assert "shapes" in str(err)
            else:
                raise AssertionError("the last rank was not told")
    assert hvd.allreduce(torch.ones(2), name="owed", op=hvd.Sum)[0] == size

# All ranks make the same mistake.
fails(ValueError, "whole numbers", lambda: hvd.alltoall(torch.ones(size, 2), torch.ones(size)))
fails(ValueError, "whole numbers", lambda: hvd.alltoall(torch.ones(size, 2), [0.5] * size))
if size > 1:
    fails(ValueError, "cannot be dealt out evenly", lambda: hvd.alltoall(torch.ones(size + 1)))
if size & (size - 1):
    fails(NotImplementedError, "power of two", lambda: hvd.allreduce(ones, op=hvd.Adasum))
fails(ValueError, "Please provide only one", lambda: hvd.allreduce(ones, average=True, op=hvd.Sum))
assert hvd.synchronize(10**9) is None
assert hvd.poll(10**9)
hvd.shutdown()
for call in (
    hvd.rank,
    hvd.size,
    hvd.local_rank,
    hvd.is_homogeneous,
    hvd.join,
    lambda: hvd.allreduce(ones),
    hvd.barrier,
):
    try:
        call()
    except ValueError as err:
        assert "has not been initialized; use hvd.init()" in str(err), traceback.format_exc()
    else:
        raise AssertionError("an operation after shutdown()")
print(f"rank {rank}: all as they should be")
