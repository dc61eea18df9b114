"""Addresses as users write them."""

import pytest

from sirtaki.errors import ConfigError
from sirtaki.host_port import parse_address


def test_addresses_are_a_host_and_a_port() -> None:
    assert parse_address(" host.example:9500 ") == ("host.example", 9500)
    assert parse_address("[::1]:9500") == ("::1", 9500)
    for text in ("", "9500", "host", "host:", ":9500", "host:x", "host:0", "host:70000", "host:٣"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            parse_address(text)
