import json

from fakes import memories

from sirtaki.profiler.step_memory_json import from_json, to_json


def test_it_comes_back_as_it_was() -> None:
    memory = memories.chain()
    assert from_json(json.loads(json.dumps(to_json(memory)))) == memory


def test_names_of_operators_are_written_once() -> None:
    assert to_json(memories.chain())["operators"] == ["", "aten::mm"]
