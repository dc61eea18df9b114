"""How sparse gradients travel, for scripts to print."""

from __future__ import annotations

from sirtaki.autotune.sparse.summary import SparseSummary
from sirtaki.engine import job
from sirtaki.engine.optimizer_gradients import reducers_of


def sparse_gradients() -> list[SparseSummary]:
    """Which way sparse gradients go, of each parameter for which it is decided; not collective.

    It is decided after some thirty iterations, or eight where `SIRTAKI_SPARSE` fixes the way; on one rank never.

    Returns:
        Of each parameter its `name`, `density` (which part of its rows any rank touches in an iteration), `plan`,
        `n_bytes` that a rank receives in an iteration, `dense_bytes` and `horovod_bytes` to compare it with, and more;
        `describe()` says it in words. The same on all ranks that train the parameter.

    Raises:
        NotInitializedError: there is no job.
    """
    return [summary for reducer in reducers_of(job.current()) for summary in reducer.sparse.summaries]
