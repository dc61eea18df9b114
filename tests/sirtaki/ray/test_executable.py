"""The user's class is called with what the user gave."""

from sirtaki.ray.executable import Executable


def test_each_call_makes_an_object() -> None:
    executable = Executable(dict, ([("a", 1)],), {"b": 2})
    assert executable.make() == {"a": 1, "b": 2}
    assert executable.make() is not executable.make()
