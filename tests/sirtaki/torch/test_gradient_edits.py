"""Edits of gradients between `backward()` and `step()` have the same effect as in one process."""

from rank_jobs import Job, played_on_ranks, slow

ENV = {"SIRTAKI_REGISTRY": "off"}
UNUSED_ARE_NONE = Job(2, "unused are none", {**ENV, "SIRTAKI_UNUSED": "none"})


test_edited_gradients_train_as_in_one_process = played_on_ranks(
    "gradient_edits", Job(2, env=ENV), slow(Job(3, env=ENV)), slow(Job(4, env=ENV))
)


test_gradients_that_nobody_computes_are_none_where_that_is_asked_for = played_on_ranks(
    "gradient_edits", UNUSED_ARE_NONE, only="unused_gradients"
)
