"""A job is observed by watchers in its process and from outside."""

import atexit

from rank_jobs import Job, played_on_ranks

from sirtaki.machine import ReservedPorts

SHORT = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "26"}


PORTS = ReservedPorts(2)
atexit.register(PORTS.close)


test_a_job_is_seen = played_on_ranks("observed", Job(2, env=SHORT))


test_a_job_is_measured = played_on_ranks(
    "observed", Job(2, env={**SHORT, "SIRTAKI_METRICS_PORT": str(PORTS.first)}), cases="METRICS"
)
