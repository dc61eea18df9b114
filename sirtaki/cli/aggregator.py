"""`sirtaki aggregator`: run a process that sums frequent rows of sparse gradients for the ranks of jobs, or print the
counters of such a process.
"""

import json
import logging
import signal
from argparse import ArgumentParser, Namespace

from sirtaki.comm.sparse.aggregator import Aggregator, Wire, ask_status
from sirtaki.errors import AggregatorError, require
from sirtaki.machine import parse_address

from .output import memory_bytes


def configure(parser: ArgumentParser) -> None:
    """Add the options of `sirtaki aggregator` to the parser."""
    parser.add_argument("--port", type=int, default=9500, metavar="P", help="UDP port (9500)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: this host only)")
    parser.add_argument(
        "--memory", type=memory_bytes, default="256M", metavar="BYTES", help="memory for the sums of all jobs (256M)"
    )
    parser.add_argument(
        "--jobs", type=int, default=16, metavar="N", help="largest number of jobs at the same time (16)"
    )
    parser.add_argument(
        "--tables", action="store_true", help="add by lookup tables, as the switch of the Libra paper does"
    )
    parser.add_argument(
        "--status", metavar="HOST:PORT", help="print the counters of the aggregator at that address as JSON, and exit"
    )


def main(options: Namespace) -> int:
    """Sum rows of sparse gradients for jobs until SIGTERM or Ctrl-C. With `--status`, only print the counters of a
    running aggregator.

    Raises:
        ConfigError: the port cannot be opened, or the value of an option is invalid.
        AggregatorError: with `--status`, no aggregator answers at the address.
    """
    if options.status:
        print(json.dumps(_status(options.status), indent=1))
        return 0
    require(options.jobs >= 1, "--jobs", "at least 1", options.jobs)
    require(0 <= options.port < 65536, "--port", "0 to 65535", options.port)
    logging.basicConfig(level=logging.INFO, format="sirtaki aggregator: %(message)s")
    wire = Wire.bound(options.host, options.port)
    aggregator = Aggregator(wire, memory_bytes=options.memory, jobs=options.jobs, by_tables=options.tables)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: aggregator.stop())
    host, port = wire.address
    print(f"listening at {host}:{port}", flush=True)
    aggregator.serve()
    return 0


def _status(address: str) -> object:
    wire = Wire.connected(parse_address(address))
    try:
        status = ask_status(wire)
    finally:
        wire.close()
    if status is None:
        raise AggregatorError(
            f"no aggregator (server that sums gradients) answers at {address}; start one with `sirtaki aggregator`, "
            "and with --host if other hosts use it"
        )
    return status
