"""Training with deferred updates is bit-identical to training where `step()` waits; on three ranks up to sums."""

from rank_jobs import UNTUNED, Job, integration, played_on_ranks, slow

CHECK = {**UNTUNED, "SIRTAKI_OVERLAP_FORWARD": "check"}
SMALL = {**UNTUNED, "SIRTAKI_UNIT_BYTES": "256", "SIRTAKI_STREAMS": "3", "SIRTAKI_TRANSPORT": "gloo"}
DOUBLE = {**SMALL, "SIRTAKI_TEST_DOUBLE": "1"}
LONG = {**UNTUNED, "SIRTAKI_TEST_STEPS": "500", "SIRTAKI_UNIT_BYTES": "2048"}
TUNED = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "8", "SIRTAKI_TEST_STEPS": "40"}


test_what_is_put_off_is_never_read_stale = played_on_ranks(
    "forward_overlap",
    Job(2, "", UNTUNED),
    slow(Job(2, "check", CHECK)),
    slow(Job(2, "small units", SMALL)),
    slow(Job(3, "three ranks", DOUBLE)),
)


test_memory_that_several_tensors_have_is_never_read_stale = played_on_ranks(
    "forward_overlap", integration(Job(2, "small units", SMALL)), only="memory_that_parameters_share_is_never_stale"
)


test_five_models_train_equally = played_on_ranks(
    "forward_overlap",
    integration(
        Job(3, "three ranks", {**DOUBLE, "SIRTAKI_UNIT_BYTES": "4096", "SIRTAKI_TEST_STEPS": "12"}), but="tied"
    ),
    slow(Job(3, "small units", DOUBLE)),
    slow(Job(5, "five ranks", DOUBLE)),
    slow(Job(2, "500 steps", LONG)),
    slow(Job(2, "tuned", TUNED)),
    cases="FIVE_MODELS",
)
