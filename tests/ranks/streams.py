"""Reduce gradients on a fake device with streams. Started by test_streams.py with several ranks.

Arguments: what to do, and how often.
"""

import os
import sys

from conformance.on_streams import Streams, conform, gain, train, train_two, ways
from fakes.streams import FakeDevice, FakeOpener

from sirtaki.comm.control.plane import ControlPlane
from sirtaki.engine.ranks import open_ranks
from sirtaki.engine.settings import Settings

local_size = os.environ.get("TEST_LOCAL_SIZE")
control = ControlPlane(open_ranks(Settings.from_environ()), local_size=int(local_size) if local_size else None)
device = FakeDevice(seed=1000 * control.rank)
through, _, what = sys.argv[1].partition("-")
iterations = int(sys.argv[2])
opener = FakeOpener(control, device) if through == "nccl" else None
streams = Streams(control, device, opener, device.reuse_when_freed)
if what == "conform":
    names = conform(streams)
    if control.rank == 0:
        print("".join(f"route {name}\n" for name in names), end="")
elif what == "ways":
    for way, became in ways(streams).items():
        print(f"{became} by {way}")
elif what == "gain":
    gain(streams)
else:
    done = {"train": train, "two": train_two}[what](streams, iterations)
    assert done == iterations * (2 if what == "train" else 1)
if opener is not None:
    control.require_equal(" ".join(opener.issued), "the order in which NCCL is used")
    if control.rank == 0:
        print(f"issued {len(opener.issued)} on {len(set(opener.opened))} communicators")
control.close()
print(f"ok {control.rank}")
