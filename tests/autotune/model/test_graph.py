"""Servers and nodes by themselves; what refuses to be a graph is in test_replayer."""

from __future__ import annotations

import pytest
from fakes.graphs import node

from sirtaki.autotune.model.replayer import Server, Work


def test_shares_of_a_server_beyond_what_is_known_of_it() -> None:
    link = Server(name="link", totals=(1.0, 1.5))
    assert [link.share(jobs) for jobs in (1, 2, 3)] == [1.0, 0.75, 0.5]


def test_a_part_of_a_job_is_on_the_line_between() -> None:
    processors = Server(name="processors", totals=(1.0, 2.0))
    assert [processors.share(jobs) for jobs in (0.5, 1.5, 2.5)] == [1.0, 1.0, 0.8]
    assert Server(name="link", totals=(1.0, 1.5)).share(1.5) == pytest.approx(1.25 / 1.5)


def test_a_node_alone_takes_its_longest_work_after_its_start_up() -> None:
    works = (Work(server=0, seconds=2.0), Work(server=1, seconds=3.0, jobs=4))
    assert node(0, 0.5, *works).alone_s == 3.5
    assert node(0, 0.5).alone_s == 0.5
