"""A plain parameter server, re-told."""

import socket
import threading

import numpy as np
from fakes.aggregators import check_sums, on_ranks, values_of

from bench.lib.parameter_server import ParameterServerRank, serve


def test_every_rank_gets_the_sum_of_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener, 3))
        server.start()
        address = listener.getsockname()

        def act(number: int) -> list[np.ndarray]:  # type: ignore[type-arg]
            rank = ParameterServerRank(address)
            found = [rank.sum(values_of(number, step, 1000 + step, 16)) for step in range(5)]
            rank.close()
            return found

        for step, sums in enumerate(zip(*on_ranks(3, act), strict=True)):
            check_sums(sums, step)
        server.join(10)
        assert not server.is_alive()
