"""What the measures make of made-up iterations."""

import numpy as np
import pytest

from bench.objective import ITERATIONS, compare, judged, rank_correlation, rows, trimmed, with_loading

SPANS_S, REST_S = np.array([0.05, 0.04, 0.03, 0.06]), 0.1
SHAPE = (len(SPANS_S), 6, ITERATIONS, 2)


def iterations(rest_s: np.ndarray | float = REST_S) -> tuple[np.ndarray, np.ndarray]:
    """Spans and whole iterations; the second rank comes 10 ms early and waits."""
    spans_s = np.broadcast_to(SPANS_S[:, None, None, None], SHAPE) + np.array([0.0, 0.01])
    return spans_s, spans_s + rest_s - np.array([0.0, 0.01])


def test_where_the_rest_is_the_same_all_measures_agree() -> None:
    for measured_s in judged(*iterations()).values():
        assert np.argsort(measured_s[:, 0, 0]).tolist() == [2, 1, 0, 3]
    assert judged(*iterations())["span"][:, 0, 0] == pytest.approx(SPANS_S)


def test_only_the_span_does_not_see_what_a_setting_does_to_the_rest() -> None:
    slows_s = np.array([0.0, 0.0, 0.02, 0.0])[:, None, None, None]
    best = {name: int(one[:, 0, 0].argmin()) for name, one in judged(*iterations(REST_S + slows_s)).items()}
    assert best == {"span": 2, "iteration": 1, "corrected": 1}


def test_a_rank_that_waits_for_data_delays_all_and_shortens_no_span() -> None:
    spans_s, steps_s = iterations()
    late_spans_s, late_steps_s = with_loading(spans_s, steps_s, np.random.default_rng(0))
    assert (late_spans_s[..., 0] == spans_s[..., 0]).all()
    delays_s = late_steps_s - steps_s
    assert np.allclose(delays_s[..., 0], delays_s[..., 1])
    assert delays_s.max() > 2 * 0.1
    assert (judged(late_spans_s, late_steps_s)["span"] == judged(spans_s, steps_s)["span"]).mean() > 0.5


def test_a_measure_without_noise_chooses_the_best_and_one_of_noise_does_not() -> None:
    rng = np.random.default_rng(0)
    true_s = judged(*iterations())["iteration"]
    sure = compare(true_s, true_s, trial=2, rng=rng)
    assert sure["chosen"] == pytest.approx(0.13 / 0.15)
    assert sure["rank_correlation"] == pytest.approx(1.0)
    luck = compare(true_s, rng.random(true_s.shape), trial=2, rng=rng)
    assert luck["chosen"] > sure["chosen"]
    assert abs(luck["rank_correlation"]) < 0.5


def test_summaries() -> None:
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]) == pytest.approx(0.5)
    assert trimmed(np.array([[1.0, 2.0, 3.0, 100.0]])) == pytest.approx([2.5])
    spans_s, steps_s = iterations()
    assert [row["measure"] for row in rows("job", {"times_s": np.stack([spans_s, steps_s], axis=-1)}, 0)] == [
        "span",
        "iteration",
        "corrected",
    ]
