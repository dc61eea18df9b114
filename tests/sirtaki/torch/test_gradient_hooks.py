"""Hooks change local gradients before these are averaged, as under DDP, in every way in which Sirtaki averages."""

from rank_jobs import OVER_MESH, Job, played_on_ranks, slow

ENV = {**OVER_MESH, "SIRTAKI_REGISTRY": "off"}


test_hooks_change_gradients_before_these_are_averaged = played_on_ranks(
    "gradient_hooks", Job(2, env=ENV), slow(Job(3, env=ENV))
)
