"""Threads are offered where they matter, and their effect becomes LIBRA's model."""

import numpy as np

from sirtaki.autotune.model.fits import ContentionModel, RateCurve
from sirtaki.engine.tuning.probes import UNIT_BYTES, ThreadProbe, contention_model, threads_matter

TRUTH = ContentionModel(
    alpha_1=0.98,
    alpha_2=5e-5,
    overlapped=RateCurve(gamma_1=8e10, gamma_2=7e10, gamma_3=0.01),
    alone=RateCurve(gamma_1=1e11, gamma_2=8e10, gamma_3=0.02),
)
ALPHA_S, COMPUTE_S = 2e-5, 8e-3


def probes(
    noise: float,
    *,
    threads: tuple[int | None, ...] = (None, 512, 1024, 2048, 4096, 8192),
    matter: bool = True,
    nccls_own: int = 512,
) -> list[ThreadProbe]:
    rng = np.random.default_rng(3)
    found = []
    for count in threads:
        seen = (count or nccls_own) if matter else 512
        for unit_bytes in UNIT_BYTES:
            exact = {
                "alone_s": ALPHA_S + TRUTH.alone.seconds(unit_bytes, seen),
                "beside_s": ALPHA_S + TRUTH.overlapped.seconds(unit_bytes, seen),
                "compute_s": COMPUTE_S / TRUTH.compute_speed(seen),
                "undisturbed_s": COMPUTE_S,
            }
            noisy = {
                name: tuple((value * (1 + noise * rng.standard_normal(3))).tolist()) for name, value in exact.items()
            }
            found.append(ThreadProbe(threads=count, unit_bytes=unit_bytes, **noisy))
    return found


def test_threads_matter_where_their_effect_exceeds_the_noise() -> None:
    assert threads_matter(probes(0.01))
    assert not threads_matter(probes(0.01, matter=False))
    assert not threads_matter(probes(0.6))


def test_one_allowance_is_no_choice() -> None:
    assert not threads_matter(probes(0.01, threads=(512,)))
    assert not threads_matter([])


def test_libras_model_comes_out_of_the_probes() -> None:
    model = contention_model(probes(0.002), alpha_s=ALPHA_S)
    assert model is not None
    for threads in (512, 2048, 8192):
        assert abs(model.compute_speed(threads) / TRUTH.compute_speed(threads) - 1) < 0.05
        for ours, true in ((model.alone, TRUTH.alone), (model.overlapped, TRUTH.overlapped)):
            assert abs(ours.bytes_per_s(threads) / true.bytes_per_s(threads) - 1) < 0.1


def test_nccls_own_choice_counts_as_the_allowance_that_it_resembles() -> None:
    for threads in (512, 4096, 8192):
        model = contention_model(probes(0.002, nccls_own=threads), alpha_s=ALPHA_S)
        assert model is not None
        assert model.default_threads == threads


def test_probes_that_fit_nothing_give_no_model() -> None:
    assert contention_model(probes(0.9), alpha_s=ALPHA_S) is None
