"""Models of links and of contention, fitted to probes and samples."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from sirtaki.autotune.knobs import KIB, MIB
from sirtaki.autotune.model.fits import (
    ComputeSample,
    ContentionModel,
    LinkProbe,
    RateCurve,
    TransmissionSample,
    fit_contention,
    fit_link,
    nonnegative_least_squares,
)
from sirtaki.errors import TuningError
from sirtaki.measures import LinkModel

LINK = LinkModel(alpha_s=1.4e-3, throughput=(5e8, 8e8, 9e8, 9e8))


def test_exact_probes_give_the_link_back():
    probes = [
        LinkProbe(unit_bytes=size, streams=n, seconds=LINK.alpha_s + n * size / LINK.total_bytes_per_s(n))
        for n in (1, 2, 4)
        for size in (64 * KIB, 512 * KIB, 4 * MIB)
    ]
    fitted = fit_link(probes)
    assert fitted.alpha_s == pytest.approx(LINK.alpha_s)
    assert fitted.throughput[0] == pytest.approx(5e8)
    assert fitted.throughput[1] == pytest.approx(8e8)
    assert fitted.throughput[2] == pytest.approx(
        9e8
    )  # three streams were not measured: each carries what one of two does
    assert fitted.residual < 1e-6


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({1: 12e6, 4: 24e6}, [12e6, 24e6, 24e6, 24e6]),  # two flows fill the link
        ({1: 12e6, 4: 40e6}, [12e6, 24e6, 36e6, 40e6]),
        ({1: 24e6, 4: 18e6}, [24e6, 22e6, 20e6, 18e6]),
    ],
)
def test_streams_between_measured_ones_carry_as_much_as_capped_flows(
    measured: dict[int, float], expected: list[float]
) -> None:
    probes = [
        LinkProbe(unit_bytes=size, streams=n, seconds=n * size / rate)
        for n, rate in measured.items()
        for size in (64 * KIB, MIB)
    ]
    assert fit_link(probes).throughput == pytest.approx(expected)


HOST_BOUND = LinkModel(alpha_s=2e-4, throughput=(8e6, 16e6, 24e6, 31e6, 31e6, 31e6, 31e6, 31e6), host_s=3e-3)


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-3), (0.03, 0.1)])
def test_small_units_on_many_streams_show_the_processors_time(noise, tolerance):
    rng = np.random.default_rng(0)
    probes = [
        LinkProbe(
            unit_bytes=size,
            streams=n,
            rounds=4,
            seconds=4 * HOST_BOUND.together_s(size, streams=n) * math.exp(noise * rng.standard_normal()),
        )
        for size, n in [(64 * KIB, 1), (MIB, 1), (MIB, 4), (64 * KIB, 8), (MIB, 8), (256 * KIB, 1)]
    ]
    fitted = fit_link(probes)
    assert fitted.host_s == pytest.approx(HOST_BOUND.host_s, rel=tolerance)
    assert fitted.throughput[0] == pytest.approx(8e6, rel=tolerance)
    assert fitted.throughput[7] == pytest.approx(31e6, rel=tolerance)


def test_one_size_is_too_little():
    with pytest.raises(TuningError, match="at least 2 sizes on one stream, found 1 size"):
        fit_link([LinkProbe(unit_bytes=1000, streams=n, seconds=1.0) for n in (1, 2)])


def test_times_that_do_not_grow_with_the_size_are_refused():
    with pytest.raises(TuningError, match="did not take longer"):
        fit_link([LinkProbe(unit_bytes=size, streams=1, seconds=1 / size) for size in (10, 100, 1000)])


def test_times_that_no_line_describes_are_refused_with_the_worst_probe():
    seconds = {1000: 1.0, 2000: 0.05, 4000: 3.0, 8000: 0.5}
    with pytest.raises(TuningError, match=r"bytes on 1 stream.* differ from the measured times by \d+%"):
        fit_link([LinkProbe(unit_bytes=size, streams=1, seconds=s) for size, s in seconds.items()])


@pytest.mark.parametrize(
    "fields",
    [
        *({"seconds": wrong} for wrong in (0.0, -1.0, math.nan, math.inf)),
        {"unit_bytes": 0},
        {"streams": 0},
        {"rounds": 0},
    ],
)
def test_probes_that_cannot_be_are_refused(fields):
    with pytest.raises(TuningError, match="positive, finite numbers, found LinkProbe"):
        LinkProbe(**{"unit_bytes": 1, "streams": 1, "seconds": 1.0, **fields})


CONTENTION = ContentionModel(
    alpha_1=0.98,
    alpha_2=1.2e-4,
    overlapped=RateCurve(gamma_1=2.5e9, gamma_2=2.3e9, gamma_3=0.02),
    alone=RateCurve(gamma_1=3.0e9, gamma_2=2.6e9, gamma_3=0.03),
)


THREADS = (128, 256, 512, 1024, 2048, 4096)


def samples_of(model, *, noise=0.0):
    rng = np.random.default_rng(0)

    def noisy(seconds):
        return seconds * math.exp(noise * rng.standard_normal())

    compute = [ComputeSample(alone_s=0.02, seconds=noisy(0.02 / model.compute_speed(r)), threads=r) for r in THREADS]
    transmissions = [
        TransmissionSample(
            unit_bytes=size,
            seconds=noisy(1e-4 + curve.seconds(size, r)),
            threads=r,
            overlapped=curve is model.overlapped,
        )
        for size in (MIB, 32 * MIB)
        for r in THREADS
        for curve in (model.overlapped, model.alone)
    ]
    return compute, transmissions


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-3), (0.03, 0.1)])
def test_overlap_samples_give_libras_functions_back(noise, tolerance):
    compute, transmissions = samples_of(CONTENTION, noise=noise)
    fitted = fit_contention(compute, transmissions, alpha_s=1e-4)
    for r in THREADS:
        assert fitted.compute_speed(r) == pytest.approx(CONTENTION.compute_speed(r), rel=tolerance)
        assert fitted.overlapped.bytes_per_s(r) == pytest.approx(CONTENTION.overlapped.bytes_per_s(r), rel=tolerance)
        assert fitted.alone.bytes_per_s(r) == pytest.approx(CONTENTION.alone.bytes_per_s(r), rel=tolerance)
    assert fitted.residual < max(2 * noise, 1e-3)


def test_one_thread_count_is_too_little():
    compute, transmissions = samples_of(CONTENTION)
    with pytest.raises(TuningError, match="computation: expected at least 2 different numbers of GPU threads, found 1"):
        fit_contention(compute[:1], transmissions, alpha_s=0.0)
    with pytest.raises(TuningError, match="transmission alone"):
        fit_contention(compute, [sample for sample in transmissions if sample.overlapped], alpha_s=0.0)


def test_samples_without_any_pattern_are_refused():
    compute, transmissions = samples_of(CONTENTION, noise=1.5)
    with pytest.raises(TuningError, match=r"speed of .* differ from the measured times"):
        fit_contention(compute, transmissions, alpha_s=1e-4)


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 2**32 - 1), st.booleans())
def test_nonnegative_least_squares_are_scipys(n_rows, n_columns, seed, repeat):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n_rows, n_columns)) * (rng.random((n_rows, n_columns)) < 0.7)
    if repeat:
        rows[:, -1] = rows[:, 0]  # no unique solution
    targets = rng.standard_normal(n_rows)
    solution = nonnegative_least_squares(rows, targets)
    _, least = nnls(rows, targets)
    assert (solution >= 0).all()
    assert np.linalg.norm(rows @ solution - targets) <= least + 1e-9


CURVE = RateCurve(gamma_1=4e8, gamma_2=3e8, gamma_3=0.02)


MODEL = ContentionModel(
    alpha_1=0.98,
    alpha_2=1e-4,
    overlapped=CURVE,
    alone=RateCurve(gamma_1=5e8, gamma_2=3e8, gamma_3=0.03),
    default_threads=1024,
    residual=0.1,
)


@pytest.mark.parametrize(
    "gammas", [(0.0, 0.0, 0.0), (-1.0, 0.0, 0.0), (1.0, 1.1, 0.0), (1.0, -0.1, 0.0), (1.0, 0.5, -0.1)]
)
def test_curves_that_fall_or_become_negative_are_rejected(gammas: tuple[float, float, float]) -> None:
    with pytest.raises(TuningError, match="RateCurve: expected gamma_1 > 0"):
        RateCurve(gamma_1=gammas[0], gamma_2=gammas[1], gamma_3=gammas[2])


def test_computation_loses_a_share_with_each_thread_but_never_stops() -> None:
    assert MODEL.compute_speed(0) == 0.98
    assert MODEL.compute_speed(1000) == pytest.approx(0.88)
    assert MODEL.compute_speed(10**6) == 0.05


@pytest.mark.parametrize("alphas", [(0.0, 0.1), (1.3, 0.1), (-0.1, 0.1), (0.9, -1e-9)])
def test_speeds_that_cannot_be_are_refused(alphas: tuple[float, float]) -> None:
    with pytest.raises(TuningError, match=r"expected 0 < alpha_1 <= 1.2 and alpha_2 >= 0"):
        replace(MODEL, alpha_1=alphas[0], alpha_2=alphas[1])


def test_a_larger_ring_carries_each_byte_more_often_and_leaves_computation_alone() -> None:
    larger = MODEL.rescaled(from_ranks=2, to_ranks=8)
    factor = (7 / 8) / (1 / 2)
    for before, after in ((MODEL.overlapped, larger.overlapped), (MODEL.alone, larger.alone)):
        assert after.seconds(1e6, 512) == pytest.approx(factor * before.seconds(1e6, 512))
    assert (larger.alpha_1, larger.alpha_2, larger.default_threads, larger.residual) == (0.98, 1e-4, 1024, 0.1)
    assert MODEL.rescaled(from_ranks=4, to_ranks=4) == MODEL
    back = larger.rescaled(from_ranks=8, to_ranks=2)
    assert back.alone.gamma_1 == pytest.approx(MODEL.alone.gamma_1)
