"""The watchers of the example work with what stands for Weights & Biases and MLflow; the real ones: integrations."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sirtaki import watch

EXAMPLE = (Path(__file__).parents[2] / "examples" / "watched_digits.py").read_text()

ITERATION = watch.IterationEnded(number=8, step_s=0.2, communication_s=0.1, exposed_s=0.05, n_bytes=64, tuning=False)
DECISION = watch.Decision(
    iteration=9, arm="grid", setting="gloo flat", knobs={}, default_s=0.2, best_s=0.1, n_trials=4, retune=False
)


@pytest.fixture
def shown() -> dict[str, Any]:
    """Its classes."""
    names: dict[str, Any] = {"watch": watch}
    exec(EXAMPLE[EXAMPLE.index("class ") : EXAMPLE.index("def add_watchers")], names)
    return names


def tell(watcher: watch.Watcher) -> None:
    watcher.iteration(ITERATION)
    watcher.decision(DECISION)
    watcher.close()


def test_weights_and_biases_gets_the_jobs_values(shown: dict[str, Any]) -> None:
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=logged.append, summary={}, finish=lambda: logged.append({}))
    tell(shown["WandbWatcher"](run))
    assert logged == [{"sirtaki/step_s": 0.2, "sirtaki/communication_s": 0.1}, {}]
    assert run.summary == {"sirtaki/setting": "gloo flat"}


def test_mlflow_gets_the_jobs_values(shown: dict[str, Any]) -> None:
    told: list[tuple[object, ...]] = []
    mlflow = SimpleNamespace(
        log_metric=lambda name, value, step: told.append((name, value, step)),
        set_tag=lambda name, value: told.append((name, value)),
        end_run=lambda: told.append(()),
    )
    tell(shown["MlflowWatcher"](mlflow))
    assert told == [("sirtaki.communication_s", 0.1, 8), ("sirtaki.setting", "gloo flat"), ()]
