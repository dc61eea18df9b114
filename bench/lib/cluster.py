"""A cluster emulated on one machine: nodes with host names, a rate for each node's link, and a cap on each flow.

Clouds cap a TCP flow far below the link rate (AWS: 5-10 of 25-100 Gbit/s). This module emulates such a network, at
rates that two cores can carry.

    node k: network, UTS, IPC and mount namespaces, host name sirtaki-n<k>, address 10.77.0.<k+1>, its own /dev/shm
    eth0 of node k ── veth ── port k of a bridge in a separate namespace

Upstream (eth0), an HTB class shapes the link, and one child class per hashed pair of TCP ports caps a flow. Downstream
(the bridge's port), HTB shapes only the link. Segments without payload have their own class, because acknowledgements
that queue behind bulk data would throttle the opposite direction. To emulate a delay, a program replaces the bridge and
delays packets (`delaying_switch`); some kernels lack netem.

Nothing exists outside the namespaces. They are inside one PID namespace whose first process dies with this process.
After an exit, Ctrl-C or a crash, the kernel removes everything, so no cleanup is needed.
"""

import contextlib
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

MBIT = 1_000_000
SETUP_TIMEOUT_S = 30.0
FLOW_CLASS_BITS = 12  # 4096 classes. They are created in a moment, and eight flows rarely share one (0.7 %).
FIRST_FLOW_CLASS = 0x100
ACK_CLASS = 0x2
OTHER_CLASS = 0x3

CUT = "bfifo limit 1"
"""Queue without room for a packet, which cuts a node's link (`NetLab.hurt`)."""

WHOLE = "pfifo limit 1000"
"""Ordinary queue, which restores a node's link (`NetLab.hurt`)."""


class LabError(RuntimeError):
    """The emulated cluster could not be built, or a job in it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabShape:
    """Properties of an emulated cluster.

    Attributes:
        nodes: number of nodes.
        link_bits_per_s: rate of each node's link, in each direction.
        flow_bits_per_s: maximum rate of one TCP connection in one direction.
        delay_s: one-way delay of every packet.
    """

    nodes: int = 4
    link_bits_per_s: int = 400 * MBIT
    flow_bits_per_s: int = 100 * MBIT
    delay_s: float = 0.0

    @property
    def caps_flows(self) -> bool:
        """Return whether a single connection gets less than the link."""
        return self.flow_bits_per_s < self.link_bits_per_s

    def describe(self) -> str:
        """Describe both rates and the delay in words."""
        delay = f", {1e3 * self.delay_s:g} ms each way" if self.delay_s else ""
        return f"link {self.link_bits_per_s / MBIT:g} Mbit/s, flow {self.flow_bits_per_s / MBIT:g} Mbit/s{delay}"


NETWORKS = {
    "capped": LabShape(link_bits_per_s=400 * MBIT, flow_bits_per_s=100 * MBIT),
    "equal": LabShape(link_bits_per_s=200 * MBIT, flow_bits_per_s=200 * MBIT),
}
"""Emulated clusters of four nodes that most benchmarks use."""


def why_unavailable() -> str | None:
    """Return why this machine cannot emulate a cluster, or None if it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", "setpriv") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (packages iproute2 and util-linux)" if missing else None


def need_cluster() -> None:
    """End the program with status 2 and the reason if no cluster can be emulated."""
    if (reason := why_unavailable()) is not None:
        print(f"the emulated cluster cannot run here: {reason}", file=sys.stderr)
        raise SystemExit(2)


class NetLab:
    """An emulated cluster. As a context manager, it is built on entry and removed on exit.

    Raises:
        LabError: this machine cannot emulate a cluster, or a setup command failed. The message has the reason.
    """

    def __init__(self, shape: LabShape = LabShape()) -> None:
        self.shape = shape
        self._switch: subprocess.Popen[str] | None = None
        self._delays: subprocess.Popen[str] | None = None
        self._directory: Path | None = None
        self._node_pids: list[int] = []  # Process ids as seen inside the lab's PID namespace.
        self._init_pid = 0  # Process id as seen from outside.

    def address(self, node: int) -> str:
        """Return the IPv4 address of a node."""
        return f"10.77.0.{node + 1}"

    def hostname(self, node: int) -> str:
        """Return the host name of a node. All nodes can resolve it."""
        return f"sirtaki-n{node}"

    def __enter__(self) -> "NetLab":
        reason = why_unavailable()
        if reason is not None:
            raise LabError(f"no emulated cluster on this machine: {reason}")
        self._directory = Path(tempfile.mkdtemp(prefix="sirtaki-lab-"))
        try:
            self._start_namespaces(self._directory)
            self._shape_links()
            if self.shape.delay_s > 0:
                self._delay_packets()
            self._write_agent(self._directory)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes in the lab, which removes the namespaces. Idempotent."""
        if self._switch is not None:
            # The kernel then kills the child of this process, the first process of the namespace, and with it all
            # processes.
            self._switch.kill()
            self._switch.communicate()
            self._switch = None
        if self._delays is not None:
            self._delays.kill()
            self._delays.communicate()
            self._delays = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def popen(
        self, node: int, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: object
    ) -> "subprocess.Popen[str]":
        """Start a program on a node, in the current directory. It is killed when the lab or this process ends.

        Args:
            node: index of the node.
            argv: program and arguments.
            env: added to this process's environment.
            options: passed to `subprocess.Popen`.
        """
        inner = ["setpriv", "--pdeathsig", "KILL", "env", f"--chdir={os.getcwd()}", *argv]
        command = ["setpriv", "--pdeathsig", "KILL", *self._enter(), *self._enter_node(node), *inner]
        # Use a separate TMPDIR for each lab. MPI names files by host and process id, which repeat from lab to lab.
        environment = {**os.environ, "TMPDIR": str(self._directory), **(env or {})}
        return subprocess.Popen(command, env=environment, text=True, **options)  # type: ignore[call-overload,no-any-return]

    def run_ranks(
        self,
        argv: Sequence[str],
        *,
        ranks_per_node: int = 1,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> str:
        """Run an MPI job over all nodes and return its standard output.

        Args:
            argv: the program of each rank.
            ranks_per_node: consecutive ranks that share a node.
            env: added to the environment of every rank.
            timeout_s: time after which the job is killed.

        Raises:
            LabError: a rank failed, or the job took too long. The message has the end of the job's output.
        """
        assert self._directory is not None, "run_ranks() must be called inside the with block"
        hosts = ",".join(f"{self.address(node)}:{ranks_per_node}" for node in range(self.shape.nodes))
        mpiexec = [shutil.which("mpiexec") or "mpiexec", "--allow-run-as-root", "--bind-to", "none"]
        network = ["--mca", "btl_tcp_if_include", "eth0", "--prtemca", "prte_if_include", "eth0"]
        agent = [
            "--prtemca",
            "plm_ssh_agent",
            str(self.agent),
            "--prtemca",
            "plm_ssh_no_tree_spawn",
            "1",
        ]
        passed = [option for name in sorted(env or {}) for option in ("-x", name)]
        ranks = str(ranks_per_node * self.shape.nodes)
        command = [*mpiexec, *network, *agent, "--host", hosts, "-np", ranks, *passed, *argv]
        job = self.popen(0, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        try:
            output, errors = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as err:
            job.kill()
            output, errors = job.communicate()
            raise LabError(f"the job took longer than {timeout_s:g} s: {(output + errors)[-2000:]}") from err
        except BaseException:
            job.kill()
            raise
        if job.returncode != 0:
            raise LabError(f"the job ended with status {job.returncode}: {(output + errors)[-4000:]}")
        return str(output)

    def _start_namespaces(self, directory: Path) -> None:
        """Start the namespaces of the switch and the nodes, and connect them, without rate limits."""
        hosts = "".join(f"{self.address(node)} {self.hostname(node)}\n" for node in range(self.shape.nodes))
        (directory / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        names = [self.hostname(node) for node in range(self.shape.nodes)]
        (directory / "setup").write_text(_setup_script(directory, names, bridged=self.shape.delay_s <= 0))
        namespaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._switch = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "sh", str(directory / "setup")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # A separate session, so that Ctrl-C reaches this process only.
        )
        deadline = time.monotonic() + SETUP_TIMEOUT_S
        while not (directory / "ready").exists():
            if self._switch.poll() is not None or time.monotonic() > deadline:
                self._switch.kill()
                _, errors = self._switch.communicate()
                raise LabError(f"the namespaces could not be set up: {errors.strip()[-1000:]}")
            time.sleep(0.02)
        children = Path(f"/proc/{self._switch.pid}/task/{self._switch.pid}/children").read_text().split()
        self._init_pid = int(children[0])
        self._node_pids = [int((directory / f"pid{node}").read_text()) for node in range(self.shape.nodes)]

    def _shape_links(self) -> None:
        for node in range(self.shape.nodes):
            self._tc(self._enter_node(node), _uplink(self.shape))
            self._tc([], _downlink(self.shape, f"port{node}"))

    def _delay_packets(self) -> None:
        ports = [f"port{node}" for node in range(self.shape.nodes)]
        program = f"from bench.lib.cluster import delaying_switch; delaying_switch({ports!r}, {self.shape.delay_s!r})"
        here = ["env", f"--chdir={os.getcwd()}", sys.executable, "-c"]
        command = ["setpriv", "--pdeathsig", "KILL", *self._enter(), *here, program]
        self._delays = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._delays.stdout is not None
        if self._delays.stdout.readline() != "ready\n":
            raise LabError("the program that delays packets ended; its error output is above")

    def reshape(self, shape: LabShape) -> None:
        """Change the rate of all links and the cap of each flow while jobs run. The delay stays."""
        self.shape = shape
        for node in range(shape.nodes):
            self._tc(self._enter_node(node), _as_changes(_uplink(shape)))
            self._tc([], _as_changes(_downlink(shape, f"port{node}")))

    def hurt(self, node: int, *, into: str = "", out_of: str = "") -> None:
        """Replace the queues of a node's packets while jobs run. This removes the rate limit of its link.

        Args:
            node: index of the node.
            into: queue of incoming packets, as an argument of tc: `CUT`, `WHOLE`, or "netem delay 200ms loss 5%"; "" =
                unchanged.
            out_of: queue of outgoing packets.

        Raises:
            LabError: the kernel does not support the queue.
        """
        if into:
            self._tc([], f"qdisc replace dev port{node} root {into}\n")
        if out_of:
            self._tc(self._enter_node(node), f"qdisc replace dev eth0 root {out_of}\n")

    @property
    def agent(self) -> Path:
        """Return a program that runs a command on a node, from any node: `agent HOST COMMAND …`."""
        assert self._directory is not None, "agent must be read inside the with block"
        return self._directory / "agent"

    def _tc(self, enter_node: Sequence[str], commands: str) -> None:
        program = ["tc", "-batch", "-"]
        done = subprocess.run([*self._enter(), *enter_node, *program], input=commands, text=True, capture_output=True)
        if done.returncode != 0:
            raise LabError(f"tc rejected the settings of a link: {done.stderr.strip()[-1000:]}")

    def _write_agent(self, directory: Path) -> None:
        """Write the program that Open MPI's launcher runs instead of ssh: `agent <host> <command …>`."""
        cases = "".join(
            f"{self.address(node)}|{self.hostname(node)}) node={pid};;\n" for node, pid in enumerate(self._node_pids)
        )
        enter = f"nsenter --target $node --net --mount --uts --ipc --wdns={shlex.quote(os.getcwd())}"
        self.agent.write_text(
            f'#!/bin/sh\ncase $1 in\n{cases}*) echo "no node $1" >&2; exit 1;;\nesac\nshift\nexec {enter} sh -c "$*"\n'
        )
        self.agent.chmod(0o755)

    def _enter(self) -> list[str]:
        """Return a prefix that runs a command in the bridge's namespace."""
        return ["nsenter", "--target", str(self._init_pid), "--net", "--mount", "--uts", "--ipc", "--pid"]

    def _enter_node(self, node: int) -> list[str]:
        """Return a prefix that, after `_enter`, runs a command on a node."""
        return ["nsenter", "--target", str(self._node_pids[node]), "--net", "--mount", "--uts", "--ipc"]


def delaying_switch(ports: Sequence[str], delay_s: float) -> None:
    """Switch Ethernet frames between network interfaces, with a delay in seconds. Never returns.

    Frames keep the kernel's offload header (virtio's), so a frame can have up to 64 KB that TCP has not yet segmented.
    """
    packet_level, vnet_header, ignore_outgoing, every_protocol = 263, 15, 23, 3  # Constants of linux/if_packet.h.
    sockets = []
    for port in ports:
        sockets.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        sockets[-1].setsockopt(packet_level, vnet_header, 1)
        sockets[-1].setsockopt(packet_level, ignore_outgoing, 1)
        sockets[-1].setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # The option SO_RCVBUFFORCE.
        sockets[-1].setsockopt(socket.SOL_SOCKET, 32, 1 << 26)  # The option SO_SNDBUFFORCE.
        sockets[-1].bind((port, every_protocol))
        sockets[-1].setblocking(False)
    print("ready", flush=True)
    there: dict[bytes, socket.socket] = {}
    under_way: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for source in select.select(sockets, [], [], wait_s)[0]:
            frame = source.recv(1 << 17)
            # virtio's 10 bytes precede the addresses: first the destination's, then the source's.
            there[frame[16:22]] = source
            under_way.append((time.monotonic() + delay_s, source, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, source, frame = under_way.popleft()
            known = there.get(frame[10:16])
            for port_socket in [known] if known is not None else [other for other in sockets if other is not source]:
                with contextlib.suppress(OSError):  # Drop the frame if the queue is full, as a switch does.
                    port_socket.send(frame)


def _setup_script(directory: Path, hostnames: Sequence[str], *, bridged: bool) -> str:
    """Return the shell program of the lab's first process. It creates and connects the nodes, then waits."""
    place = shlex.quote(str(directory))
    nodes = "".join(
        f"""
unshare --net --uts --ipc --mount sh -eu -c '
  hostname {name}; mount -t tmpfs tmpfs /dev/shm; mount --bind {place}/hosts /etc/hosts
  echo $$ > {place}/new{node}; mv {place}/new{node} {place}/pid{node}; exec sleep infinity' &
"""
        for node, name in enumerate(hostnames)
    )
    mtu = "" if bridged else "mtu 9000"  # Larger frames, as in clouds: `delaying_switch` then has fewer to copy.
    joins = "".join(
        f"""
tries=0
until [ -e {place}/pid{node} ]; do tries=$((tries+1)); [ $tries -lt 500 ]; sleep 0.02; done
pid=$(cat {place}/pid{node})
ip link add port{node} {mtu} type veth peer name eth0 {mtu} netns $pid
ip link set port{node}{" master bridge" if bridged else ""} up
nsenter --target $pid --net sh -eu -c '
  ip link set lo up; ip address add 10.77.0.{node + 1}/16 dev eth0; ip link set eth0 up
  sysctl -qw net.ipv4.tcp_congestion_control=cubic || true'
"""
        for node in range(len(hostnames))
    )
    bridge = "ip link set lo up\n"
    if bridged:
        bridge += "ip link add bridge type bridge forward_delay 0\nip link set bridge up\n"
    return f"set -eu\n{bridge}{nodes}{joins}\necho > {place}/ready\nwait\n"  # `wait` also reaps orphans.


def _link_classes(device: str, shape: LabShape) -> str:
    """Return `tc` commands for the classes of either direction: link, acknowledgements, and traffic without TCP."""
    link = shape.link_bits_per_s
    return (
        f"qdisc add dev {device} root handle 1: htb default {OTHER_CLASS:x}\n"
        f"class add dev {device} parent 1: classid 1:1 htb rate {link}bit burst 64k cburst 64k\n"
        f"class add dev {device} parent 1:1 classid 1:{ACK_CLASS:x} htb rate {link // 20}bit ceil {link}bit prio 0\n"
        f"class add dev {device} parent 1:1 classid 1:{OTHER_CLASS:x} htb rate {link // 20}bit ceil {link}bit "
        f"burst 64k cburst 64k prio 1\n"
    )


def _uplink(shape: LabShape) -> str:
    """Return `tc` commands for a node's own interface: the link's rate, and the cap of each flow.

    A flow class has almost no guaranteed rate and borrows from the link up to its ceiling, because HTB serves
    guarantees even if their sum exceeds the link.
    """
    classes = "".join(
        f"class add dev eth0 parent 1:1 classid 1:{FIRST_FLOW_CLASS + index:x} htb rate 8kbit "
        f"ceil {shape.flow_bits_per_s}bit burst 64k cburst 64k quantum 16000 prio 1\n"
        for index in range(1 << FLOW_CLASS_BITS)
    )
    return _link_classes("eth0", shape) + classes + _filter("eth0", flow_classifier(flows=True))


def _as_changes(commands: str) -> str:
    """Return the commands as changes of existing classes."""
    lines = (line for line in commands.splitlines(keepends=True) if line.startswith("class add"))
    return "".join(line.replace("class add", "class change", 1) for line in lines)


def _downlink(shape: LabShape, port: str) -> str:
    """Return `tc` commands for a bridge's port: the link's rate."""
    return _link_classes(port, shape) + _filter(port, flow_classifier(flows=False))


def _filter(device: str, bytecode: str) -> str:
    return f'filter add dev {device} parent 1: protocol all prio 1 bpf bytecode "{bytecode}"\n'


_OPCODES = {
    "load half": 0x28,
    "load byte": 0x30,
    "load half at x": 0x48,
    "load byte at x": 0x50,
    "x = ip header length": 0xB1,
    "x = m": 0x61,
    "m = a": 0x02,
    "a &= k": 0x54,
    "a >>= k": 0x74,
    "a *= k": 0x24,
    "a += k": 0x04,
    "a -= x": 0x1C,
    "a ^= x": 0xAC,
    "if a == k": 0x15,
    "if a != k": 0x15,
    "return k": 0x06,
    "return a": 0x16,
}


def flow_classifier(*, flows: bool) -> str:
    """Return classic BPF code, as for `tc filter … bpf bytecode`, that maps a frame to its HTB class.

    Acknowledgements go to their own class. TCP segments with payload go to one of the flow classes, by a hash of both
    ports (one port alone would merge all connections of a listening socket). Everything else goes to the default class.

    Args:
        flows: classify segments with payload by flow. Otherwise they go to the default class.
    """
    ethernet, frame_type, protocol, total_length = 14, 12, 23, 16
    major = 1 << 16
    by_ports: list[tuple[str, int, str]] = [
        ("x = ip header length", ethernet, ""),
        ("load half at x", ethernet, ""),  # Load the source port.
        ("a *= k", 0x9E3779B1, ""),
        ("m = a", 0, ""),
        ("load half at x", ethernet + 2, ""),  # Load the destination port.
        ("x = m", 0, ""),
        ("a ^= x", 0, ""),
        ("a *= k", 0x85EBCA6B, ""),
        ("a >>= k", 32 - FLOW_CLASS_BITS, ""),
        ("a += k", major + FIRST_FLOW_CLASS, ""),
        ("return a", 0, ""),
    ]
    program = [
        ("load half", frame_type, ""),
        ("if a != k", 0x0800, "default"),
        ("load byte", protocol, ""),
        ("if a != k", 6, "default"),
        ("x = ip header length", ethernet, ""),
        ("load byte at x", ethernet + 12, ""),  # The upper half of the byte is the TCP header length in words.
        ("a &= k", 0xF0, ""),
        ("a >>= k", 2, ""),
        ("m = a", 0, ""),
        ("load half", total_length, ""),
        ("a -= x", 0, ""),
        ("x = m", 0, ""),
        ("a -= x", 0, ""),
        ("if a == k", 0, "acknowledgement"),
        *(by_ports if flows else []),
        ("return k", 0, "default:"),  # No match: the default class.
        ("return k", major + ACK_CLASS, "acknowledgement:"),
    ]
    places = {label[:-1]: index for index, (_, _, label) in enumerate(program) if label.endswith(":")}
    lines = []
    for index, (operation, constant, label) in enumerate(program):
        distance = places[label] - index - 1 if operation.startswith("if") else 0
        jumps = (distance, 0) if operation == "if a == k" else (0, distance)
        lines.append(f"{_OPCODES[operation]} {jumps[0]} {jumps[1]} {constant}")
    return f"{len(lines)}," + ",".join(lines)
