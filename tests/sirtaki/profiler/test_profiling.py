import pytest

from sirtaki.analysis import recorder as profiling
from sirtaki.errors import NotInitializedError
from sirtaki.profiler import profile
from sirtaki.settings import ProfileRequest


def test_a_recording_needs_a_job(tmp_path) -> None:
    with pytest.raises(NotInitializedError), profile(tmp_path):
        pass


class _Asked:
    def __init__(self, **settings):
        from types import SimpleNamespace

        self.settings = SimpleNamespace(**settings)


def test_at_least_one_iteration_is_recorded(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(profiling, "current", lambda: _Asked(profile=None))
    with pytest.raises(ValueError, match="at least one iteration, not 0"), profile(tmp_path, iterations=0):
        pass


def test_a_job_that_is_recorded_already_is_not_recorded_twice(monkeypatch, tmp_path) -> None:
    asked = _Asked(profile=ProfileRequest(folder=str(tmp_path), iterations=2, operators=False))
    monkeypatch.setattr(profiling, "current", lambda: asked)
    monkeypatch.setattr(profiling, "_from_environment", None)
    profiling.begin_as_set()
    begun = profiling._from_environment
    assert begun is not None
    profiling.begin_as_set()  # of the next generation of an elastic job
    assert profiling._from_environment is begun
    with pytest.raises(ValueError, match="recorded already"), profile(tmp_path):
        pass
    begun.end()


def test_nothing_is_begun_where_nothing_is_set(monkeypatch) -> None:
    monkeypatch.setattr(profiling, "current", lambda: _Asked(profile=None))
    monkeypatch.setattr(profiling, "_from_environment", None)
    profiling.begin_as_set()
    assert profiling._from_environment is None
