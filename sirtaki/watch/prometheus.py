"""Totals as Prometheus reads them, on a port of this process."""

from __future__ import annotations

import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


class MetricsServer:
    """Answers GET /metrics, in threads of its own."""

    def __init__(self, totals: Totals, *, host: str, port: int, rank: int, size: int) -> None:
        """Begins to listen.

        Raises:
            OSError: it cannot.
        """

        class Handler(BaseHTTPRequestHandler):
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

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
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
