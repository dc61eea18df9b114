"""Slow libraries are loaded once, when they are needed, and leave none of the caller's frames behind."""

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from sirtaki.autotune.arms.techniques import import_late, require
from sirtaki.errors import TuningError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where modules of the test lie."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    import_late.cache_clear()


def test_what_is_missing_is_said_at_once_and_nothing_is_loaded(folder: Path) -> None:
    (folder / "slow_one.py").write_text("raise AssertionError('loaded')")
    require("test", "slow_one", "slow-one")
    assert "slow_one" not in sys.modules
    with pytest.raises(TuningError, match="the test arm needs fast-one: pip install fast-one, or leave the arm out"):
        require("test", "fast_one", "fast-one")


def test_modules_come_in_the_order_asked_for_and_once(folder: Path) -> None:
    for name in ("slow_a", "slow_b"):
        (folder / f"{name}.py").write_text("import threading; thread = threading.current_thread()")
    first, second = import_late("slow_b", "slow_a")
    assert (first.__name__, second.__name__) == ("slow_b", "slow_a")
    assert import_late("slow_b", "slow_a") == (first, second)
    assert sys.modules["slow_a"] is second


def test_an_error_that_a_module_keeps_holds_nothing_of_the_caller(folder: Path) -> None:
    (folder / "slow_c.py").write_text("try:\n    import not_there\nexcept ImportError as err:\n    kept = err\n")

    class Model:
        pass

    model = Model()
    known = weakref.ref(model)
    import_late("slow_c")
    del model
    gc.collect()
    assert known() is None
    frames, traceback = [], sys.modules["slow_c"].kept.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        while frame is not None:
            frames.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        traceback = traceback.tb_next
    assert "test_an_error_that_a_module_keeps_holds_nothing_of_the_caller" not in frames


def test_a_module_that_cannot_be_loaded_is_the_callers_error_and_is_tried_again(folder: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="slow_d"):
        import_late("slow_d")
    (folder / "slow_d.py").write_text("")
    import importlib

    importlib.invalidate_caches()
    assert import_late("slow_d")[0].__name__ == "slow_d"
