"""One tree of errors, as its docstring draws it."""

import pickle
import re

import pytest

from sirtaki import errors
from sirtaki.errors import CommError, SirtakiError

CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, BaseException) and cls.__module__ == errors.__name__
}


def drawn() -> dict[str, tuple[str, str]]:
    """Return, for each class, its base class and its built-in base class."""
    found: dict[str, tuple[str, str]] = {}
    above: dict[int, str] = {}
    for line in (errors.__doc__ or "").splitlines()[2:]:
        matched = re.match(r"([│ ├└─]*)(\w+)(?:\s+\((\w+)\))?", line)
        assert matched is not None
        depth = len(matched[1]) // 4
        above[depth] = matched[2]
        found[matched[2]] = above.get(depth - 1, "Exception") if depth else "Exception", matched[3] or ""
    return found


def test_the_tree_is_as_it_is_drawn() -> None:
    assert set(drawn()) == set(CLASSES)
    for name, (parent, builtin) in drawn().items():
        bases = [base.__name__ for base in CLASSES[name].__bases__]
        assert bases == [parent, builtin] if builtin else bases == [parent]


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_every_error_is_ours_and_survives_pickling_with_its_message(cls: type[SirtakiError]) -> None:
    assert issubclass(cls, SirtakiError)
    assert cls.__doc__
    back = pickle.loads(pickle.dumps(cls("rank 3 proposes 7 buckets")))
    assert type(back) is cls
    assert str(back) == "rank 3 proposes 7 buckets"


def test_errors_of_operations_can_be_caught_as_in_horovods_scripts() -> None:
    for cls in (errors.MismatchError, errors.PeerLostError, errors.StallError, errors.TransportError):
        assert issubclass(cls, CommError)
        assert issubclass(cls, RuntimeError)
    assert not issubclass(errors.ConfigError, CommError)
