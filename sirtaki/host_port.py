"""Addresses of processes that listen, as users write them."""

from sirtaki.errors import ConfigError

Address = tuple[str, int]


def parse_address(text: str) -> Address:
    """`host:port` → both.

    Raises:
        ConfigError: it is something else.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is not the address of an aggregator; expected HOST:PORT, such as 10.0.0.5:9500")
    return host.strip("[]"), int(port)
