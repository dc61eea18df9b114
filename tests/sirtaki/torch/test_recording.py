from types import SimpleNamespace

import pytest

from sirtaki.analysis import recorder as profiling
from sirtaki.engine import job
from sirtaki.torch.basics import record_if_wanted


@pytest.mark.parametrize(("folder", "begun"), [(None, 0), ("somewhere", 1)])
def test_a_job_is_recorded_on_request(monkeypatch: pytest.MonkeyPatch, folder: str | None, begun: int) -> None:
    asked: list[int] = []
    monkeypatch.setattr(job, "current", lambda: SimpleNamespace(settings=SimpleNamespace(profile=folder)))
    monkeypatch.setattr(profiling, "begin_as_set", lambda: asked.append(1))
    record_if_wanted()
    assert len(asked) == begun
