import os
import subprocess
import sys

import pytest

from bench.lib.cluster import FIRST_FLOW_CLASS, FLOW_CLASS_BITS, LabError, LabShape, NetLab, why_unavailable
from bench.lib.cluster import flow_classifier as classifier

needs_lab = pytest.mark.skipif(why_unavailable() is not None, reason=f"no emulated cluster: {why_unavailable()}")

# One flow sends for half a second over the loopback of a namespace pair; the receiver prints bytes per second.
RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 7000)); print("listening", flush=True)
link, _ = server.accept(); link.settimeout(10); received = 0
while time.perf_counter() and (data := link.recv(1 << 16)):
    begin = time.perf_counter() if not received else begin
    received += len(data); end = time.perf_counter()
print(received / (end - begin))
"""
SEND = """
import socket, time
link = socket.create_connection(("10.77.0.2", 7000), timeout=10); end = time.perf_counter() + 0.7
while time.perf_counter() < end: link.send(bytes(1 << 14))
link.close()
"""


def said_on(lab: NetLab, node: int, argv: list[str]) -> str:
    with lab.popen(node, argv, stdout=subprocess.PIPE) as program:
        output = program.communicate(timeout=20)[0]
    assert program.returncode == 0
    return output


def run_classifier(frame: bytes, *, flows: bool) -> int:
    """A classic BPF machine, as far as the classifier needs one."""
    lines = classifier(flows=flows).split(",")[1:]
    a = x = index = 0
    stack = {}
    while True:
        code, jump_true, jump_false, k = map(int, lines[index].split())
        index += 1
        if code in (0x28, 0x48):
            at = k + (x if code == 0x48 else 0)
            a = int.from_bytes(frame[at : at + 2], "big")
        elif code in (0x30, 0x50):
            a = frame[k + (x if code == 0x50 else 0)]
        elif code == 0xB1:
            x = 4 * (frame[k] & 15)
        elif code == 0x61:
            x = stack[k]
        elif code == 0x02:
            stack[k] = a
        elif code == 0x15:
            index += jump_true if a == k else jump_false
        elif code == 0x06:
            return k
        elif code == 0x16:
            return a
        else:
            operand = k if not code & 8 else x
            a = {0x50: a & operand, 0x70: a >> operand, 0x20: a * operand, 0x00: a + operand, 0x10: a - operand}.get(
                code & 0xF0, a ^ operand
            ) & 0xFFFFFFFF


def tcp_frame(source: int, destination: int, payload: int, *, options: int = 12) -> bytes:
    header = bytearray(20 + options)
    header[0:4] = source.to_bytes(2, "big") + destination.to_bytes(2, "big")
    header[12] = (20 + options) // 4 << 4
    ip = bytearray(20)
    ip[0], ip[9] = 0x45, 6
    ip[2:4] = (20 + len(header) + payload).to_bytes(2, "big")
    return bytes(12) + b"\x08\x00" + bytes(ip) + bytes(header) + bytes(payload)


def test_segments_without_payload_have_their_own_class():
    assert run_classifier(tcp_frame(40000, 7000, 0), flows=True) == 0x10002
    assert run_classifier(tcp_frame(40000, 7000, 0, options=0), flows=False) == 0x10002


def test_frames_that_are_not_tcp_have_the_default_class():
    arp = bytes(12) + b"\x08\x06" + bytes(46)
    udp = bytearray(tcp_frame(1, 2, 100))
    udp[23] = 17
    assert run_classifier(arp, flows=True) == run_classifier(bytes(udp), flows=True) == 0


def test_a_flow_keeps_its_class_and_flows_of_one_listener_rarely_share_one():
    classes = [run_classifier(tcp_frame(port, 7000, 1000), flows=True) for port in range(40000, 40064)]
    assert classes == [run_classifier(tcp_frame(port, 7000, 9), flows=True) for port in range(40000, 40064)]
    first = (1 << 16) + FIRST_FLOW_CLASS
    assert all(first <= number < first + (1 << FLOW_CLASS_BITS) for number in classes)
    assert len(set(classes)) >= 60


def test_where_flows_do_not_matter_payload_has_the_default_class():
    assert run_classifier(tcp_frame(40000, 7000, 1000), flows=False) == 0


@pytest.mark.parametrize(("user", "tools", "reason"), [(1000, "/usr/bin/x", "need root"), (0, None, "not installed")])
def test_a_machine_that_cannot_emulate_a_cluster_says_why(monkeypatch, user, tools, reason):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda tool: tools)
    assert reason in (why_unavailable() or "")
    with pytest.raises(LabError, match=reason), NetLab():
        pass


@needs_lab
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces")
def test_nodes_have_names_and_addresses_and_a_flow_is_capped_and_nothing_is_left_behind():
    shape = LabShape(nodes=2, link_bits_per_s=80_000_000, flow_bits_per_s=20_000_000)
    with NetLab(shape) as lab:
        assert said_on(lab, 1, ["hostname"]) == "sirtaki-n1\n"
        with lab.popen(1, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "listening\n"
            said_on(lab, 0, [sys.executable, "-c", SEND])
            rate = 8 * float(receiver.communicate(timeout=20)[0])
        assert 0.7 * shape.flow_bits_per_s < rate < 1.3 * shape.flow_bits_per_s
        sleeper = lab.popen(0, ["sleep", "1000"])
        switch = lab._switch
    assert sleeper.wait(timeout=5) != 0
    assert switch is not None
    assert switch.returncode is not None
    assert "sirtaki" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


@needs_lab
def test_an_mpi_job_runs_over_the_nodes_and_a_failing_one_is_an_error():
    rank = "import os; from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.allreduce(1), os.environ['MARK'])"
    with NetLab(LabShape(nodes=2)) as lab:
        output = lab.run_ranks([sys.executable, "-c", rank], ranks_per_node=2, env={"MARK": "here"}, timeout_s=60)
        assert output.split("\n").count("4 here") == 4
        with pytest.raises(LabError, match="ended with status 3"):
            lab.run_ranks(["sh", "-c", "exit 3"], timeout_s=60)
        with pytest.raises(LabError, match="took longer than 1 s"):
            lab.run_ranks(["sleep", "100"], timeout_s=1)


@pytest.mark.slow
@needs_lab
def test_links_are_given_another_rate_while_they_are_used() -> None:
    with NetLab(LabShape(nodes=2, link_bits_per_s=400_000_000, flow_bits_per_s=400_000_000)) as lab:
        lab.reshape(LabShape(nodes=2, link_bits_per_s=20_000_000, flow_bits_per_s=20_000_000))
        with lab.popen(1, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            said_on(lab, 0, [sys.executable, "-c", SEND])
            rate = float(receiver.communicate(timeout=20)[0])
    assert rate < 1.1 * 20e6 / 8
