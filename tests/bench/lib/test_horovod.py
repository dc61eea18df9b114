"""Horovod's groups: whole gradients in order, tick by tick."""

from bench.lib.horovod import horovod_groups


def test_what_is_ready_at_a_tick_is_sent_together() -> None:
    ends, noticed_s = horovod_groups([0.1, 0.9, 1.0, 1.1, 2.5], [1] * 5, cycle_s=1.0)
    assert ends == [3, 4, 5]
    assert noticed_s == (1.0, 1.0, 1.0, 2.0, 3.0)


def test_a_group_ends_before_it_exceeds_the_threshold_and_a_large_gradient_goes_alone() -> None:
    ends, _ = horovod_groups([0.5] * 6, [4, 4, 3, 20, 1, 1], cycle_s=1.0, fusion_bytes=10)
    assert ends == [2, 3, 4, 6]
