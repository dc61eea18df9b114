"""Short messages beside the collectives: kept by what they are about, in order, whoever looks first."""

import threading

import pytest
from fakes.meshes import among, until

from sirtaki.comm.control.communicator import Communicator
from sirtaki.comm.control.failure import poll_until
from sirtaki.comm.control.watchdog import Courier, Tag


def meet(comm: Communicator) -> None:
    poll_until(comm.barrier(), failures=comm.failures)


def test_messages_come_with_their_senders_in_the_order_in_which_each_sent_them() -> None:
    def act(comm: Communicator) -> None:
        courier = Courier(comm.duplicate())
        assert courier.receive(Tag.WHERE) == []
        meet(comm)
        for number in range(20):
            courier.send((comm.rank + 1) % 3, Tag.HERE, number)
            courier.send((comm.rank + 2) % 3, Tag.HERE, ("far", number))
        meet(comm)  # what was sent before has come
        received = courier.receive(Tag.HERE)
        assert len(received) == 40
        before, behind = (comm.rank - 1) % 3, (comm.rank + 1) % 3
        assert [message for rank, message in received if rank == before] == list(range(20))
        assert [message for rank, message in received if rank == behind] == [("far", n) for n in range(20)]
        meet(comm)

    among(3, act)


def test_what_is_about_something_else_is_kept_until_somebody_asks() -> None:
    def act(comm: Communicator) -> None:
        courier = Courier(comm.duplicate())
        if comm.rank == 0:
            courier.send(1, Tag.WHERE)
            courier.send(1, Tag.LOST, "rank 2")
            courier.send(1, Tag.WHERE, 5)
            courier.send(1, Tag.LEAVING)
        else:
            until(lambda: bool(courier.receive(Tag.LEAVING)))  # the last one
            assert courier.receive(Tag.LOST) == [(0, "rank 2")]
            assert courier.receive(Tag.WHERE) == [(0, None), (0, 5)]
            assert courier.receive(Tag.WHERE) == []
        meet(comm)

    among(2, act)


def test_what_is_for_all_goes_to_all_others() -> None:
    def act(comm: Communicator) -> None:
        courier = Courier(comm.duplicate())
        assert (courier.rank, courier.size) == (comm.rank, 3)
        if comm.rank == 1:
            courier.send_all(Tag.JOINED, {"iteration": 7})
        meet(comm)
        received: list[object] = []
        if comm.rank != 1:
            until(lambda: received.extend(courier.receive(Tag.JOINED)) or received)  # type: ignore[func-returns-value, return-value]
        assert received == ([] if comm.rank == 1 else [(1, {"iteration": 7})])
        assert courier.receive(Tag.JOINED) == []
        meet(comm)

    among(3, act)


def test_several_threads_lose_no_message_between_them() -> None:
    each, threads_a_rank = 50, 3

    def act(comm: Communicator) -> None:
        courier, found, lock = Courier(comm.duplicate()), list[tuple[int, object]](), threading.Lock()

        def work(thread: int) -> None:
            for number in range(each):
                courier.send(1 - comm.rank, Tag.BLOCKED, (thread, number))
                some = courier.receive(Tag.BLOCKED)
                with lock:
                    found.extend(some)

        threads = [threading.Thread(target=work, args=[thread]) for thread in range(threads_a_rank)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: found.extend(courier.receive(Tag.BLOCKED)) or len(found) == each * threads_a_rank)  # type: ignore[func-returns-value]
        assert sorted(message for _, message in found) == [(t, n) for t in range(threads_a_rank) for n in range(each)]  # type: ignore[type-var]
        meet(comm)

    among(2, act)


def test_what_cannot_be_pickled_is_not_sent() -> None:
    def act(comm: Communicator) -> None:
        courier = Courier(comm.duplicate())
        with pytest.raises(Exception, match="pickle"):
            courier.send_all(Tag.HERE, threading.Lock())
        courier.send_all(Tag.HERE, "fine")
        received: list[object] = []
        until(lambda: received.extend(courier.receive(Tag.HERE)) or received)  # type: ignore[func-returns-value, return-value]
        assert received == [(1 - comm.rank, "fine")]
        meet(comm)

    among(2, act)
