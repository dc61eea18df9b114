"""Sirtaki's modules under Horovod's names: the same objects, and an error that says what is not there."""

import importlib
import sys
from collections.abc import Iterator

import pytest

import sirtaki.torch
import sirtaki.torch.elastic
import sirtaki.torch.process_sets
from sirtaki.run.as_horovod import SHIM, HorovodFinder, install


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
            del sys.modules[name]

    forget()
    monkeypatch.syspath_prepend(SHIM)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    forget()


def test_what_is_imported_is_sirtakis_own_object() -> None:
    install()
    assert importlib.import_module("horovod.torch") is sirtaki.torch
    assert importlib.import_module("horovod.torch.elastic") is sirtaki.torch.elastic
    assert importlib.import_module("horovod.torch.elastic.state") is sys.modules["sirtaki.torch.elastic.state"]
    assert importlib.import_module("horovod.ray") is sys.modules["sirtaki.ray"]
    assert importlib.import_module("horovod.common.process_sets") is sirtaki.torch.process_sets
    assert sirtaki.torch.__spec__ is not None
    assert sirtaki.torch.__spec__.name == "sirtaki.torch"  # its own, not the alias's


def test_installing_twice_is_once_and_it_comes_first() -> None:
    install()
    install()
    assert isinstance(sys.meta_path[0], HorovodFinder)
    assert [isinstance(finder, HorovodFinder) for finder in sys.meta_path].count(True) == 1


@pytest.mark.parametrize(
    "name",
    ["horovod.tensorflow", "horovod.torch.nothing", "horovod.common.nothing", "horovod.ray.nothing", "horovod.x.y"],
)
def test_what_has_no_counterpart_is_not_there_and_says_so(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{name} has no counterpart in Sirtaki, which stands in") as caught:
        HorovodFinder().find_spec(name)
    assert caught.value.name == name


@pytest.mark.parametrize("name", ["horovod", "horovod.common", "horovod.runner", "torch", "horovodx.torch", "sirtaki"])
def test_what_is_not_its_business_is_left_to_others(name: str) -> None:
    assert HorovodFinder().find_spec(name) is None


def test_every_module_of_horovods_that_has_moved_is_there() -> None:
    install()
    for name in ("horovod.common.exceptions", "horovod.common.util", "horovod.common.basics"):
        assert importlib.import_module(name) is importlib.import_module(importlib.import_module(name).__name__)
        assert importlib.import_module(name).__name__.startswith("sirtaki.torch.")
