"""Packets of one size, many at a time."""

import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from sirtaki.aggregator.wire import Wire
from sirtaki.errors import ConfigError


def pair(*, batches: bool, heard_in_batches: bool) -> tuple[Wire, Wire]:
    heard = Wire.bound("127.0.0.1", 0, batches=heard_in_batches)
    return Wire.connected(heard.address, batches=batches), heard


def received(wire: Wire, packets: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < packets and wire.wait(2):
        found += [row.tobytes() for rows, _ in wire.batches() for row in rows]
    return found


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("heard_in_batches", [True, False])
def test_what_is_sent_at_once_comes_packet_by_packet(batches: bool, heard_in_batches: bool) -> None:
    sender, receiver = pair(batches=batches, heard_in_batches=heard_in_batches)
    rows = np.random.default_rng(0).integers(0, 256, (200, 1472), dtype=np.uint8)
    sender.send_rows(rows)
    sender.send(b"short")
    assert received(receiver, 201) == [*(row.tobytes() for row in rows), b"short"]
    sender.close()
    receiver.close()


def test_whoever_has_sent_can_be_answered() -> None:
    sender, receiver = pair(batches=True, heard_in_batches=True)
    sender.send(b"ask")
    assert receiver.wait(2)
    ((rows, address),) = list(receiver.batches())
    assert rows.tobytes() == b"ask"
    receiver.send_rows(np.full((3, 8), 65, np.uint8), address)
    assert received(sender, 3) == [b"A" * 8] * 3
    sender.close()
    receiver.close()


def test_an_empty_packet_is_one_too() -> None:
    sender, receiver = pair(batches=True, heard_in_batches=True)
    sender.send(b"")
    assert receiver.wait(2)
    assert [rows.shape for rows, _ in receiver.batches()] == [(1, 0)]
    sender.close()
    receiver.close()


def test_that_nobody_listens_is_noted_and_no_error() -> None:
    sender, receiver = pair(batches=True, heard_in_batches=True)
    receiver.close()
    for _ in range(3):
        sender.send(b"anyone?")
        sender.wait(0.2)
        assert list(sender.batches()) == []
    assert sender.refused
    sender.close()


def test_an_address_in_use_is_an_error_with_the_address() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}: "):
            Wire.bound("127.0.0.1", port)


def test_a_host_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no aggregator can be reached at 256\.1\.1\.1:5"):
        Wire.connected(("256.1.1.1", 5))
    with pytest.raises(ConfigError, match="no aggregator can be reached at"):
        Wire.connected(("é" * 70, 5))


SHORT_FRAMES = """
import numpy as np
from sirtaki.aggregator.wire import Wire
heard = Wire.bound("127.0.0.1", 0)
sender = Wire.connected(heard.address)
rows = np.arange(100, dtype=np.uint8)[:, None].repeat(1472, axis=1)
for row in range(0, 100, 50):
    sender.send_rows(rows[row : row + 50])
came = [int(each[-1]) for _ in range(3) if heard.wait(1) for batch, _ in heard.batches() for each in batch]
assert came == list(range(100)), came
"""


def test_packets_longer_than_a_frame_come_in_fragments() -> None:
    """As in a tunnel; in a network namespace whose frames have 1300 bytes."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, unshare and ip")
    commands = 'ip link set lo mtu 1300 up && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", commands, sys.executable, SHORT_FRAMES],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("this machine makes no network namespaces")
    assert done.returncode == 0, done.stderr
