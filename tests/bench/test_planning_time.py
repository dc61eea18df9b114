"""What is timed of the planners."""

from bench.planning_time import asc_wfbp, libra, random_layers, tasks


def test_the_programmes_are_run_on_what_their_bars_name():
    plan = libra(12, chunks=8, coarse=False, seed=0)()
    assert plan.ends[-1] == 12
    assert len(plan.ends) <= 10
    assert len(asc_wfbp(7)()) == 7
    compute_s, sizes = random_layers(1000, 0)
    assert len(compute_s) == len(sizes) == 1000


def test_the_bars_are_those_that_were_promised():
    limits = {name: limit_s for name, (_, limit_s) in tasks(0).items() if limit_s is not None}
    assert sorted(limits.values()) == [0.05, 2.0, 5.0, 10.0]
    assert limits["dpro on BERT-Base"] == 10.0
