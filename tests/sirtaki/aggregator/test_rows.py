"""Sums of tensors, with one verdict on all ranks."""

import os
import socket
import time
from typing import Any

import pytest
import torch
from fakes.aggregators import client_of, process, serving
from fakes.meshes import close, connected, on_all

from sirtaki.aggregator import HeatLayout
from sirtaki.aggregator.client import AggregatedRows, Agreement
from sirtaki.comm.control.mesh import MeshCommunicator
from sirtaki.errors import AggregatorError, ConfigError

LAYOUT = HeatLayout(rows=400, width=8)


def rows_of(comm: MeshCommunicator, addresses: list[str]) -> AggregatedRows:
    agreement = Agreement(comm)
    client = client_of(addresses, comm.rank, comm.size, LAYOUT, check=agreement.check)
    return AggregatedRows(client, agreement)


def on_mesh(ranks: int, act: Any) -> list[Any]:
    links = connected(ranks)
    try:
        return on_all(links, act)
    finally:
        close(links)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_come_back_as_sums_of_their_kind(dtype: torch.dtype) -> None:
    with serving() as (address, _):

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [address])
            values = torch.full((400, 8), comm.rank + 1.0, dtype=dtype, requires_grad=True)
            found = [rows.sum_rows(values), rows.sum_rows(values[:7])]
            rows.close()
            rows.close()
            return found

        for one, few in on_mesh(3, act):
            assert one.dtype == dtype
            assert torch.equal(one, torch.full((400, 8), 6.0, dtype=dtype))
            assert few.shape == (7, 8)
            assert not one.requires_grad


def test_a_killed_aggregator_ends_in_the_same_step_on_all_ranks_and_none_has_its_sums() -> None:
    with process() as (address, first):

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [address])
            done = 0
            try:
                for step in range(200):
                    if comm.rank == 1 and step == 20:
                        first.kill()
                    rows.sum_rows(torch.ones(400, 8))
                    done += 1
            except AggregatorError as err:
                with pytest.raises(AggregatorError, match="given up in an earlier step"):
                    rows.sum_rows(torch.ones(400, 8))
                return done, rows.is_open, str(err)
            return done, rows.is_open, ""

        results = on_mesh(3, act)
    assert {done for done, _, _ in results} in ({20}, {21})
    assert not any(is_open for _, is_open, _ in results)
    assert all("aggregator" in text for _, _, text in results)


def test_a_standby_is_used_before_anybody_is_told() -> None:
    with process() as (standby, _), process("--standby", standby) as (address, first):

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [address])
            for step in range(30):
                if comm.rank == 1 and step == 10:
                    first.kill()
                total = rows.sum_rows(torch.full((400, 8), float(comm.rank + step)))
                assert torch.equal(total, torch.full((400, 8), 3.0 * step + 3))
            rows.close()
            return True

        assert on_mesh(3, act) == [True] * 3


def test_numbers_that_are_no_floats_are_refused() -> None:
    with serving() as (address, _):

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [address])
            with pytest.raises(ConfigError, match=r"torch.int64 cannot be summed"):
                rows.sum_rows(torch.ones(1, 8, dtype=torch.int64))
            rows.close()
            return True

        assert on_mesh(1, act) == [True]


def test_a_rank_that_alone_cannot_reach_it_keeps_nobody_waiting() -> None:
    with serving() as (address, _), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [nobody if comm.rank == 1 else address])
            begin_s = time.monotonic()
            with pytest.raises(AggregatorError) as caught:
                rows.sum_rows(torch.ones(400, 8))
            return time.monotonic() - begin_s, str(caught.value)

        results = on_mesh(3, act)
    assert all(took_s < 10.0 for took_s, _ in results)  # not the minute after which the others would give up
    assert "no aggregator answers" in results[1][1]
    assert "rank 1 gets no sums: no aggregator answers" in results[0][1]


def test_a_socket_that_fails_is_an_aggregator_that_is_gone() -> None:
    with serving() as (address, _):

        def act(comm: MeshCommunicator) -> Any:
            rows = rows_of(comm, [address])
            rows.sum_rows(torch.ones(400, 8))
            if comm.rank == 0:
                rows._client._contact.wire._sock.shutdown(socket.SHUT_RDWR)
                os.close(rows._client._contact.wire._sock.detach())
            with pytest.raises(AggregatorError):
                rows.sum_rows(torch.ones(400, 8))
            return True

        assert on_mesh(2, act) == [True] * 2
