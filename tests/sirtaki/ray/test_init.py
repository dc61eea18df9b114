"""The package without Ray."""

import importlib.util

import pytest

import sirtaki.ray


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in sirtaki.ray.__all__:
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'sirtaki\[ray\]'"):
            getattr(sirtaki.ray, name)


def test_what_is_not_there_is_no_matter_of_ray() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'RayExecutr'"):
        _ = sirtaki.ray.RayExecutr
