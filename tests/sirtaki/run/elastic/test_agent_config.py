"""An agent understands what it is told, and shows the secret to nobody."""

import json

import pytest

from sirtaki.run.elastic.succession import AgentConfig

VALUES = {
    "host": "node1", "number": 3, "places": [["10.0.0.1", 4000]], "secret": "hidden", "job": "j", "command": ["python"],
    "environ": {"A": "1"}, "folder": "/", "hosts": "many", "interface": None, "successor_config": None,
}  # fmt: skip


def test_it_comes_as_one_line_of_json() -> None:
    config = AgentConfig.decode(json.dumps(VALUES).encode() + b"\n")
    assert (config.host, config.number, config.places, config.command) == (
        "node1",
        3,
        (("10.0.0.1", 4000),),
        ("python",),
    )
    assert "hidden" not in repr(config)


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", json.dumps({**VALUES, "more": 1}).encode()])
def test_anything_else_is_an_error(line: bytes) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        AgentConfig.decode(line)
