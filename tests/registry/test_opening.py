"""Where the registry lies, and how it is opened."""

from pathlib import Path

import pytest

from sirtaki.errors import RegistryError
from sirtaki.registry.safe_store import default_path, open_store


def test_it_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "sirtaki" / "registry.db"


@pytest.mark.parametrize("cache", ["", "relative/path"])
def test_a_cache_that_is_no_absolute_path_does_not_count(
    cache: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "sirtaki" / "registry.db"


def test_what_is_no_place_for_a_registry_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError):
        open_store(str(tmp_path / "file" / "registry.db"))
