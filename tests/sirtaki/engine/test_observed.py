"""A job is seen by those who watch it, in its process and from outside."""

import random
import socket

from rank_jobs import Job, played_on_ranks

SHORT = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "26"}


def free_ports() -> int:
    """A port that is free, as the next one is, and stays so: none that the system gives to connections."""
    while True:
        port = random.randrange(20_000, 32_000, 2)
        try:
            for each in (port, port + 1):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port


test_a_job_is_seen = played_on_ranks("observed", Job(2, env=SHORT))


test_a_job_is_measured = played_on_ranks(
    "observed", Job(2, env={**SHORT, "SIRTAKI_METRICS_PORT": str(free_ports())}), cases="METRICS"
)
