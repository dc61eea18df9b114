"""Defaults of the process and modes of the script change nothing of what Sirtaki does."""

from rank_jobs import OVER_MESH, UNTUNED, Job, played_on_ranks, slow

test_defaults_and_modes_change_no_result = played_on_ranks(
    "defaults",
    Job(2, env={**OVER_MESH, **UNTUNED}),
    slow(Job(3, env=OVER_MESH)),  # tuned
)
