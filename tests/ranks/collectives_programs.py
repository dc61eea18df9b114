"""Random programs of various operations, submitted in a different order on each rank. Started by test_collectives.py.

Arguments: number of programs.
"""

import random
import sys
from collections.abc import Callable

import torch

import sirtaki.torch as hvd

Start = Callable[[], int]
Check = Callable[[object], bool]


def operation(kind: str, name: str, shape: tuple[int, ...], rank: int, size: int, root: int) -> tuple[Start, Check]:
    """Return a function that starts an operation on this rank's tensor, and a function that checks its result."""
    mine = torch.full(shape, float(rank + 1))
    total = float(sum(range(1, size + 1)))
    match kind:
        case "sum":
            return lambda: hvd.allreduce_async(mine, name=name, op=hvd.Sum), lambda r: bool((r == total).all())
        case "average":
            wanted = torch.tensor(total / size)
            return lambda: hvd.allreduce_async(mine, name=name), lambda r: torch.allclose(r, wanted.expand_as(r))
        case "max":
            return lambda: hvd.allreduce_async_(mine, name=name, op=hvd.Max), lambda r: bool((r == size).all())
        case "group":
            tensors = [mine, mine * 2]
            return (
                lambda: hvd.grouped_allreduce_async(tensors, name=name, op=hvd.Sum),
                lambda r: bool((r[0] == total).all() and (r[1] == 2 * total).all()),
            )
        case "broadcast":
            return lambda: hvd.broadcast_async(mine, root, name=name), lambda r: bool((r == root + 1).all())
        case "gather":
            rows = torch.full((rank + 1, *shape), float(rank + 1))
            wanted = torch.cat([torch.full((other + 1, *shape), float(other + 1)) for other in range(size)])
            return lambda: hvd.allgather_async(rows, name=name), lambda r: torch.equal(r, wanted)
        case "scatter":
            rows = torch.full((size, *shape), float(rank + 1))
            return (
                lambda: hvd.reducescatter_async(rows, name=name, op=hvd.Sum),
                lambda r: r.shape[0] == 1 and bool((r == total).all()),
            )
        case _:
            rows = torch.full((size, *shape), float(rank + 1))
            senders = torch.arange(1.0, size + 1).reshape(-1, *(1 for _ in shape)).expand(size, *shape)
            return lambda: hvd.alltoall_async(rows, name=name), lambda r: torch.equal(r, senders)


KINDS = ("sum", "average", "max", "group", "broadcast", "gather", "scatter", "exchange")


def main(programs: int) -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for program in range(programs):
        shared, own = random.Random(program), random.Random(1000 * program + rank)
        operations = []
        for number in range(shared.randrange(1, 16)):
            shape = tuple(shared.randrange(0, 5) for _ in range(shared.randrange(0, 3)))
            # Half of the names occur again in later programs, with other operations.
            name = f"again.{number}" if shared.random() < 0.5 else f"once.{program}.{number}"
            kind = shared.choice(KINDS)
            operations.append((kind, *operation(kind, name, shape, rank, size, shared.randrange(size))))
        own.shuffle(operations)
        started = [(kind, start(), check) for kind, start, check in operations]
        own.shuffle(started)
        for kind, handle, check in started:
            if own.random() < 0.3:
                hvd.poll(handle)
            assert check(hvd.synchronize(handle)), f"{kind} in program {program}"
    hvd.shutdown()
    print(f"rank {rank}: {programs} programs")


main(int(sys.argv[1]))
