"""Serve the totals of a rank (numbers of iterations and trials, seconds, bytes) to Prometheus, over HTTP."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from sirtaki.machine import free_in_forked_children, in_forked_children

from .watchers import Totals

logger = logging.getLogger(__name__)


class TotalsCollector(Collector):
    """Metrics of one rank for Prometheus, computed from the rank's `Totals` at each request."""

    def __init__(self, totals: Totals, *, rank: int, size: int) -> None:
        self._totals, self._rank, self._size = totals, str(rank), size

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with its current value. Thread-safe."""
        totals = self._totals
        exposed = totals.exposed_s / totals.step_s if totals.step_s > 0.0 else 0.0
        counters, gauges = CounterMetricFamily, GaugeMetricFamily
        for kind, name, description, value in (
            (counters, "iterations", "Training iterations that have ended.", totals.iterations),
            (counters, "step_seconds", "Time of whole steps.", totals.step_s),
            (counters, "communication_seconds", "First ready gradient to last reduced.", totals.communication_s),
            (counters, "exposed_seconds", "Communication that no backward pass hid.", totals.exposed_s),
            (gauges, "exposed_share", "Exposed communication as part of all steps.", exposed),
            (counters, "gradient_bytes", "Bytes of gradients reduced.", totals.n_bytes),
            (counters, "trials", "Settings that the tuner tried; on rank 0.", totals.trials),
            (counters, "decisions", "Decisions of the tuner; on rank 0.", totals.decisions),
            (gauges, "generation", "Generation of an elastic job; 0 where ranks stay.", totals.generation_number),
            (gauges, "ranks", "Ranks of the job.", self._size),
        ):
            metric = kind(f"sirtaki_{name}", description, labels=["rank"])
            metric.add_metric([self._rank], value)
            yield metric


CONNECTIONS, TIMEOUT_S = 16, 5.0
"""Limits of the metrics server: number of open connections, and seconds without data until a connection is closed.

One more connection closes the oldest one.
"""


class _Handler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


class _MetricsHttpServer(ThreadingWSGIServer):
    """`prometheus_client`'s server with a connection limit, so that clients cannot exhaust threads or descriptors."""

    # Largest number of connections that wait for `accept`. Further clients retry after a second.
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self._lock = free_in_forked_children(threading.Lock())
        self._open: dict[Any, None] = {}  # Sockets of open connections, oldest first.
        super().__init__(*args)
        in_forked_children(self, _MetricsHttpServer.close_in_child)

    def server_bind(self) -> None:
        """Bind without looking up this host's name, because a name server may answer slowly."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def close_in_child(self) -> None:
        """Close the sockets in a forked child, which would otherwise hold the port without answering."""
        for connection in (self.socket, *self._open):
            connection.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own. Close the oldest connection if too many are open."""
        with self._lock:
            if len(self._open) >= CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    # Shut down the oldest connection: its thread then reads the end of the stream and closes the
                    # connection.
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and stop counting it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed request at debug level: a client has disconnected or sent an invalid request."""
        logger.debug(
            "an HTTP request to the metrics server (SIRTAKI_METRICS_PORT) failed; the server continues", exc_info=True
        )


class MetricsServer:
    """HTTP server that answers GET /metrics in its own threads."""

    def __init__(self, totals: Totals, *, host: str, port: int, rank: int, size: int) -> None:
        """Open the port, and answer requests in new threads.

        Raises:
            OSError: the port cannot be opened.
        """
        registry = CollectorRegistry()
        registry.register(TotalsCollector(totals, rank=rank, size=size))
        self._server = make_server(host, port, make_wsgi_app(registry), _MetricsHttpServer, _Handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="sirtaki-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the server, and close its port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
