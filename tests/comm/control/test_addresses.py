"""Finding an address that other hosts can reach."""

import socket

import pytest

from sirtaki.comm.control.addresses import interface_addresses, own_addresses, reach
from sirtaki.errors import CommError, ConfigError


def test_loopback_is_known_and_not_offered() -> None:
    assert interface_addresses()["lo"] == "127.0.0.1"
    assert not [address for address in own_addresses(None) if address.startswith("127.")]


def test_a_named_interface_is_offered_alone() -> None:
    assert own_addresses("lo") == ["127.0.0.1"]
    assert own_addresses("nothing,lo") == ["127.0.0.1"]


def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="lo"):
        own_addresses("eth99")


def test_the_first_address_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reach(["127.0.0.2", "127.0.0.1"], port) == ("127.0.0.1", "127.0.0.1")


def test_an_unreachable_rank_0_is_an_error_that_says_what_to_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(CommError, match="SIRTAKI_GLOO_IFACE"):
        reach(["127.0.0.1"], port)
