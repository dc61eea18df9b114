import importlib.util
import math

import pytest

from sirtaki.errors import ConfigError
from sirtaki.watch import Decision, GenerationBegun, IterationEnded, TensorBoard, TrialEnded


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))


def iteration(number: int, step_s: float) -> IterationEnded:
    return IterationEnded(number=number, step_s=step_s, communication_s=0.02, exposed_s=0.01, n_bytes=1, tuning=False)


def test_what_is_known_is_written_at_its_iteration() -> None:
    writer = Writer()
    board = TensorBoard(writer=writer, every=2)
    board.iteration(iteration(1, 0.1))
    board.iteration(iteration(2, math.nan))
    board.trial(TrialEnded(iteration=5, arm="a", setting="s", knobs={}, communication_s=math.inf, best_s=0.3))
    board.decision(
        Decision(iteration=9, arm="grid", setting="gloo", knobs={}, default_s=1.0, best_s=0.2, n_trials=3, retune=False)
    )
    board.generation(GenerationBegun(number=2, rank=0, size=4))
    board.close()
    assert writer.scalars == [
        ("sirtaki/communication_s", 0.02, 2),
        ("sirtaki/exposed_s", 0.01, 2),
        ("sirtaki/trial/best_s", 0.3, 5),
        ("sirtaki/decision/communication_s", 0.2, 9),
        ("sirtaki/ranks", 4, 2),
    ]
    assert writer.texts == [("sirtaki/setting", "gloo (proposed by grid)", 9)]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="TensorBoard is here")
def test_where_it_is_missing_the_remedy_is_told() -> None:
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoard()
