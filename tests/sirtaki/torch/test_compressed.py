"""Gradients that travel in fewer bytes, between ranks that use sockets."""

from rank_jobs import OVER_MESH, UNTUNED, Job, integration, played_on_ranks, slow

GLOO = {"SIRTAKI_TRANSPORT": "gloo"}
SMALL_UNITS = {"SIRTAKI_UNIT_BYTES": "8192", "SIRTAKI_STREAMS": "3"}


test_what_is_lost_on_the_way_is_given_back = played_on_ranks(
    "compressed",
    Job(2, env={**UNTUNED, **GLOO}),
    integration(
        Job(3, "small units", {**UNTUNED, **GLOO, **OVER_MESH, **SMALL_UNITS}),
        but="what_is_applied_and_owed_is_the_sum",
    ),
    slow(Job(1, env=UNTUNED)),
    slow(Job(4, "mpi", {**UNTUNED, "SIRTAKI_TRANSPORT": "mpi"})),
    slow(Job(2, "tuned", {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "8", **GLOO})),
)
