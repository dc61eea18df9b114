"""A socket that loses packets."""

import numpy as np

from bench.lib.lossy_wire import LossyWire
from sirtaki.aggregator.wire import Wire


def test_it_loses_about_as_many_packets_as_it_should_and_no_others() -> None:
    heard = LossyWire.listening(("127.0.0.1", 0), loss=0.1, seed=0)
    sender = Wire.connected(heard.address)
    rows = np.arange(40, dtype=np.uint8)[:, None].repeat(100, axis=1)
    came = 0
    for _ in range(50):
        sender.send_rows(np.ascontiguousarray(rows))
        heard.wait(1)
        for batch, _ in heard.batches():
            came += len(batch)
            assert (batch == batch[:, :1]).all()
    assert came + heard.lost == 2000
    assert 140 < heard.lost < 260
    sender.close()
    heard.close()
    quiet = LossyWire.towards(("127.0.0.1", 9), loss=1.0, seed=0)
    assert list(quiet.batches()) == []
    quiet.close()
