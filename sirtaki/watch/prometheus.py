"""Totals as Prometheus reads them, on a port of this process."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sirtaki.machine import free_in_forked_children, in_forked_children

from .watchers import Totals

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(totals: Totals, *, rank: int, size: int) -> str:
    """The text of one answer."""
    exposed = totals.exposed_s / totals.step_s if totals.step_s > 0.0 else 0.0
    metrics = (
        ("iterations_total", "counter", "Training iterations that have ended.", totals.iterations),
        ("step_seconds_total", "counter", "Time of whole steps.", totals.step_s),
        ("communication_seconds_total", "counter", "First ready gradient to last reduced.", totals.communication_s),
        ("exposed_seconds_total", "counter", "Communication that no backward pass hid.", totals.exposed_s),
        ("exposed_share", "gauge", "Exposed communication as part of all steps.", exposed),
        ("gradient_bytes_total", "counter", "Bytes of gradients reduced.", totals.n_bytes),
        ("trials_total", "counter", "Settings that the tuner tried; on rank 0.", totals.trials),
        ("decisions_total", "counter", "Decisions of the tuner; on rank 0.", totals.decisions),
        ("generation", "gauge", "Of an elastic job; 0 where ranks stay.", totals.generation_number),
        ("ranks", "gauge", "Ranks of the job.", size),
    )
    lines = []
    for name, kind, meaning, value in metrics:
        lines += [f"# HELP sirtaki_{name} {meaning}", f"# TYPE sirtaki_{name} {kind}"]
        lines.append(f'sirtaki_{name}{{rank="{rank}"}} {value}')
    return "\n".join(lines) + "\n"


CONNECTIONS, TURN_S = 16, 5.0
"""How many connections are served at a time (one more, and the oldest is closed), and how long one may say nothing."""


class _Server(ThreadingHTTPServer):
    """Serves few at a time, so that strangers cost neither threads nor descriptors."""

    daemon_threads = True
    request_queue_size = 128  # of connections that nobody has accepted yet; beyond that a client waits for a second

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = free_in_forked_children(threading.Lock())
        self._under_way: dict[Any, None] = {}  # sockets, the oldest first
        super().__init__(address, handler)
        in_forked_children(self, _Server.close_in_child)

    def server_bind(self) -> None:
        """As HTTP servers do, but for asking a name server what this host is called, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def close_in_child(self) -> None:
        """In a process that the script has forked: it would keep the port, and never answer."""
        for connection in (self.socket, *self._under_way):
            connection.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own."""
        with self._lock:
            if len(self._under_way) >= CONNECTIONS:
                oldest = next(iter(self._under_way))
                del self._under_way[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
            self._under_way[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes the connection."""
        with self._lock:
            self._under_way.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has hung up, or asked for nonsense."""
        logger.debug("a request for metrics failed", exc_info=True)


class MetricsServer:
    """Answers GET /metrics, in threads of its own."""

    def __init__(self, totals: Totals, *, host: str, port: int, rank: int, size: int) -> None:
        """Begins to listen.

        Raises:
            OSError: it cannot.
        """

        class Handler(BaseHTTPRequestHandler):
            timeout = TURN_S

            def do_GET(self) -> None:
                known = self.path.partition("?")[0] in ("/", "/metrics")
                body = render(totals, rank=rank, size=size).encode() if known else b"metrics are at /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                logger.debug(format, *args)

        self._server = _Server((host, port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="sirtaki-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
