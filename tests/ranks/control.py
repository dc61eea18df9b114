"""Agreements of the ranks over the control plane. Started by test_control.py."""

import sys
from unittest import mock

import numpy as np
import pytest

from sirtaki.comm.control import plane
from sirtaki.comm.control.plane import ControlPlane
from sirtaki.comm.control.watchdog import MessageBoard, Tag
from sirtaki.engine.ranks import open_ranks
from sirtaki.engine.settings import Settings
from sirtaki.errors import ConfigError, MismatchError

local_size = int(sys.argv[1]) if sys.argv[1] != "all" else None
control = ControlPlane(open_ranks(Settings.from_environ()), local_size=local_size)
rank, size = control.rank, control.size
local = local_size or size

assert (control.local_rank, control.local_size) == (rank % local, local)
assert (control.cross_rank, control.cross_size) == (rank // local, size // local)
assert control.local_sizes == [local] * size
assert control.node_ranks == list(range(rank // local * local, (rank // local + 1) * local))
assert control.is_homogeneous
assert control.one_node == (local == size)

assert control.all_gather("x" * rank) == ["x" * other for other in range(size)]
for root in range(size):
    assert control.broadcast({"from": rank} if rank == root else None, root) == {"from": root}
assert control.minimum(np.array([rank, -rank], dtype=float)).tolist() == [0.0, 1.0 - size]
assert control.total(np.array([1.0, rank])).tolist() == [size, size * (size - 1) / 2]

control.require_equal("same", "the plan")
if size > 1:
    with pytest.raises(MismatchError, match=f"the plan.*rank {size - 1} has odd"):
        control.require_equal("odd" if rank == size - 1 else "same", "the plan")

store, address = control.store(), control.address()
store.set(f"rank{rank}", str(rank))
assert [store.get(f"rank{other}").decode() for other in range(size)] == [str(other) for other in range(size)]
assert address == "127.0.0.1"
prefixes = [control.next_prefix() for _ in range(3)]
assert len(set(prefixes)) == 3
assert control.all_gather(prefixes) == [prefixes] * size
control.barrier()

# Messages beside collectives: no rank waits for them, each reader gets its own, and a rank's messages stay in order.
courier = MessageBoard(control.duplicate())
assert courier.receive(Tag.JOINED) == []
control.barrier()
courier.send_all(Tag.JOINED, rank)
for number in range(3):
    courier.send((rank + 1) % size, Tag.ITERATION, (rank, number))
joined, iterations = [], []
while len(joined) < size - 1 or len(iterations) < 3:
    joined += courier.receive(Tag.JOINED)
    iterations += courier.receive(Tag.ITERATION)
assert sorted(joined) == [(other, other) for other in range(size) if other != rank]
before = (rank - 1) % size
assert iterations == [(before, (before, number)) for number in range(3)]
control.barrier()
assert not any(courier.receive(tag) for tag in Tag)
assert control.hosts == [0] * size
control.barrier()
control.close()

# Two hosts with the same name are two hosts.
with mock.patch.object(plane, "host_identity", return_value=("localhost", f"boot {rank % 2}")):
    apart = ControlPlane(open_ranks(Settings.from_environ()))
assert apart.hosts == [other % 2 for other in range(size)]
assert len(set(apart.host_names)) == 1
apart.close()

# All ranks reject a node size that does not divide the number of ranks.
if size > 1:
    with pytest.raises(ConfigError, match="SIRTAKI_LOCAL_SIZE"):
        ControlPlane(open_ranks(Settings.from_environ()), local_size=size + 1)
print(f"ok {rank}")
