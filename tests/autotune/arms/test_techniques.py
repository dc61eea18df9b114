"""Search techniques: the contract of arms, what each arm finds, and arms of other packages."""

import gc
import importlib.metadata
import logging
import math
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.arm import ARM_CHECKS, GPU, ONLY_STREAMS, WIDE, MakeArm, converse, span_of, trial_of

from sirtaki.autotune.arms import techniques
from sirtaki.autotune.arms.bayesian import BayesianArm, GaussianProcess, IntArray
from sirtaki.autotune.arms.techniques import (
    N_INITIAL,
    OUR_ARMS,
    CompressorArm,
    GridArm,
    HyperbandArm,
    NcclArm,
    PBTArm,
    ScikitOptimizeArm,
    check_choices,
    chosen_arms,
    import_late,
    make_arm,
    require_package,
)
from sirtaki.autotune.knobs import Cut, FloatArray, KnobLattice, Knobs, KnobSpace, Lossy, NcclWays
from sirtaki.autotune.meta.bandit import BanditArm, default_arms
from sirtaki.autotune.trial import Arm, Proposal, Trial, TrialStatus
from sirtaki.comm.plan import Algorithm, NcclWay, TransportKind, UnitClass
from sirtaki.errors import ConfigError, TuningError


def grid(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return GridArm(space)


def bayesian(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return BayesianArm(space, rng=rng)


def pbt(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return PBTArm(space, rng=rng)


def hyperband(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return HyperbandArm(space, rng=rng)


def scikit_optimize(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return ScikitOptimizeArm(space, rng=rng)


def compressors(space: KnobSpace, rng: np.random.Generator) -> Arm:
    """Return the arm that proposes codecs, after a setting has run."""
    return CompressorArm(space)


def nccl(space: KnobSpace, rng: np.random.Generator) -> Arm:
    """Return the arm that proposes NCCL settings, after a setting has run."""
    return NcclArm(space)


def bandit(space: KnobSpace, rng: np.random.Generator) -> Arm:
    return BanditArm([GridArm(space), BayesianArm(space, rng=rng)], rng=rng, window=6)


@pytest.mark.lengthy
@pytest.mark.parametrize("check", ARM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(
    "make",
    [grid, bayesian, pbt, hyperband, pytest.param(scikit_optimize, marks=pytest.mark.slow), compressors, nccl, bandit],
    ids=lambda make: make.__name__,
)
def test_search_technique(check: Callable[[MakeArm], None], make: MakeArm) -> None:
    check(make)


LOSSY = replace(WIDE, lossy=("int8", "powersgd:4", "topk:0.01"))
PLAIN = Knobs(unit_bytes=4 << 20, streams=4, transport=TransportKind.GLOO)


def told(arm: Arm, knobs: Knobs, span_s: float) -> None:
    arm.tell([trial_of(Proposal(arm="somebody", knobs=knobs), span_s)])


def test_each_compressor_is_tried_on_the_fastest_setting_and_then_class_by_class() -> None:
    arm = CompressorArm(LOSSY)
    assert arm.ask() == []  # nothing to compress yet
    told(arm, PLAIN.but(streams=1), 2.0)
    told(arm, PLAIN, 1.0)
    first = [proposal.knobs for proposal in arm.ask(8)]
    assert [knobs.lossy for knobs in first] == [Lossy.all_by(name) for name in LOSSY.lossy]
    assert all(knobs in LOSSY and knobs.streams == 4 for knobs in first)
    assert first[1].unit_bytes == LOSSY.unit_bytes[1] // 4  # whole matrices
    for knobs, span_s in zip(first, (0.5, 0.7, 0.9), strict=True):
        told(arm, knobs, span_s)
    asked = [proposal.knobs for proposal in arm.ask(30)]
    then = [knobs.lossy for knobs in asked if knobs.unit_bytes == PLAIN.unit_bytes]
    assert Lossy(large="int8", embeddings="topk:0.01", small="int8") in then
    assert Lossy(large="int8", embeddings="int8") in then
    assert all(sum(lossy.by(kind) != "int8" for kind in UnitClass) == 1 for lossy in then)
    assert {2 * PLAIN.unit_bytes, PLAIN.unit_bytes // 2} <= {knobs.unit_bytes for knobs in asked}


NCCL_WAYS = (NcclWays(large=NcclWay.RING_SIMPLE), NcclWays(large=NcclWay.TREE_LL128), NcclWays(small=NcclWay.RING_LL))
NCCL = replace(GPU, unit_bytes=(64 << 10, 64 << 20), threads=(None, 512, 1024), nccl=NCCL_WAYS)
OVER_NCCL = Knobs(unit_bytes=4 << 20, streams=2, transport=TransportKind.NCCL)


def asked_of(arm: Arm) -> list[Knobs]:
    return [proposal.knobs for proposal in arm.ask(50)]


def test_nccl_settings_are_tried_on_the_fastest_setting_and_then_on_its_neighbours() -> None:
    arm = NcclArm(NCCL)
    assert arm.ask() == []  # nothing has run yet
    told(arm, OVER_NCCL.but(streams=1), 2.0)
    told(arm, OVER_NCCL, 1.0)
    ring, tree = (OVER_NCCL.but(nccl=ways) for ways in NCCL_WAYS[:2])
    assert asked_of(arm) == [ring, tree]  # it has no small units
    told(arm, ring, 1.02)  # the noise may be more than that
    told(arm, tree, 1.5)
    beside = asked_of(arm)
    assert all(knobs.nccl == ring.nccl for knobs in beside)
    assert {(knobs.unit_bytes, knobs.streams, knobs.threads) for knobs in beside} == {
        (2 << 20, 2, None),
        (8 << 20, 2, None),
        (4 << 20, 1, None),
        (4 << 20, 4, None),
        (4 << 20, 2, 512),
        (4 << 20, 2, 1024),
    }
    half = ring.but(unit_bytes=1 << 20)
    told(arm, half, 0.5)
    assert half.but(nccl=NcclWays(large=NcclWay.TREE_LL128)) in asked_of(arm)
    assert not any(knobs.unit_bytes == 512 << 10 for knobs in asked_of(arm))  # small units may not be told that


def test_units_of_a_plan_get_nccl_settings_by_size_class() -> None:
    arm = NcclArm(NCCL)
    planned = OVER_NCCL.but(cuts=(Cut(stop=1 << 20), Cut(stop=(1 << 20) + 10)))
    told(arm, planned, 1.0)
    assert [knobs.nccl for knobs in asked_of(arm)] == list(NCCL_WAYS)
    told(arm, planned.but(nccl=NcclWays(large=NcclWay.RING_SIMPLE)), 0.5)
    assert NcclWays(small=NcclWay.RING_LL, large=NcclWay.RING_SIMPLE) in [knobs.nccl for knobs in asked_of(arm)]


def test_nccl_settings_that_were_rejected_are_not_proposed_again() -> None:
    arm = NcclArm(NCCL)
    told(arm, OVER_NCCL, 1.0)
    told(arm, OVER_NCCL.but(nccl=NCCL_WAYS[0]), math.inf)
    told(arm, OVER_NCCL.but(streams=4), 0.9)
    assert asked_of(arm) == [OVER_NCCL.but(streams=4, nccl=NCCL_WAYS[1])]


def test_units_on_shared_memory_are_compressed_over_sockets() -> None:
    space = replace(LOSSY, routes=((TransportKind.SHARED_MEMORY, Algorithm.FLAT), *LOSSY.routes))
    arm = CompressorArm(space)
    told(arm, PLAIN.but(transport=TransportKind.SHARED_MEMORY), 1.0)
    asked = [proposal.knobs for proposal in arm.ask(8)]
    assert {knobs.route for knobs in asked} == {(TransportKind.GLOO, Algorithm.FLAT)}
    assert asked[0].but(transport=TransportKind.SHARED_MEMORY) not in space
    nowhere = CompressorArm(replace(LOSSY, routes=((TransportKind.SHARED_MEMORY, Algorithm.FLAT),)))
    told(nowhere, PLAIN.but(transport=TransportKind.SHARED_MEMORY), 1.0)
    assert nowhere.ask() == []


class Mine:
    name = "mine"

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        return []

    def tell(self, trials: Sequence[Trial]) -> None:
        pass


def make_mine(space: KnobSpace, rng: np.random.Generator) -> Mine:
    return Mine()


def make_nothing(space: KnobSpace, rng: np.random.Generator) -> object:
    return object()


def make_trouble(space: KnobSpace, rng: np.random.Generator) -> object:
    raise ZeroDivisionError("no")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that a package brings entry points `name = tests' function`."""

    def install(**makers: Any) -> None:
        points = [
            importlib.metadata.EntryPoint(name=name, value=f"{__name__}:{make.__name__}", group="sirtaki.arms")
            for name, make in makers.items()
        ]
        monkeypatch.setattr(techniques, "entry_points", lambda group: [p for p in points if p.group == group])
        monkeypatch.setitem(__import__("sys").modules, __name__, __import__("types").SimpleNamespace(**globals()))

    return install


def test_a_package_can_bring_an_arm(installed: Callable[..., None]) -> None:
    installed(mine=make_mine)
    assert make_arm("mine", space=WIDE, rng=np.random.default_rng(0)).name == "mine"
    assert "mine" in default_arms(space=WIDE, rng=np.random.default_rng(0)).bandit.arms


def test_a_package_cannot_replace_one_of_ours(installed: Callable[..., None]) -> None:
    installed(grid=make_mine)
    assert make_arm("grid", space=WIDE, rng=np.random.default_rng(0)).name == "grid"


def test_an_unknown_name_is_refused_with_the_names_there_are(installed: Callable[..., None]) -> None:
    installed(mine=make_mine)
    with pytest.raises(
        TuningError, match="'gird'; choose one of grid, pbt, bayesian, hyperband, scikit_optimize, mine"
    ):
        make_arm("gird", space=WIDE, rng=np.random.default_rng(0))


def test_a_script_chooses_arms_by_name_by_function_of_the_space_or_as_objects(installed: Callable[..., None]) -> None:
    installed(mine=make_mine)
    given, spaces = Mine(), list[KnobSpace]()

    def make(space: KnobSpace, rng: np.random.Generator) -> Arm:
        spaces.append(space)
        return GridArm(space)

    choices = ["mine", "bayesian", make, given]
    check_choices(choices)
    by_name, bayesian, made, last = chosen_arms(choices, space=GPU, rng=np.random.default_rng(0))
    assert isinstance(by_name, Mine)
    assert isinstance(bayesian, BayesianArm)
    assert (type(made), spaces) == (GridArm, [GPU])
    assert last is given
    for wrong, complaint in ((["gird"], "grid, pbt"), ([], "at least one"), ("grid", "a list"), ([3], "found 3")):
        with pytest.raises(ConfigError, match=complaint):
            check_choices(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "complaint"), [(make_trouble, "ZeroDivisionError"), (make_nothing, "no name and no ask")]
)
def test_a_broken_arm_is_an_error_if_named_and_a_warning_if_not(
    make: Callable[..., object], complaint: str, installed: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    installed(broken=make)
    rng = np.random.default_rng(0)
    with pytest.raises(TuningError, match=complaint):
        default_arms(space=WIDE, rng=rng, names=["grid", "broken"])
    assert default_arms(space=WIDE, rng=rng).bandit.arms == tuple(OUR_ARMS)
    assert complaint in caplog.text
    assert "does not use the search technique 'broken'" in caplog.text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for modules of the test."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    import_late.cache_clear()


def test_a_missing_package_is_reported_at_once_and_nothing_is_loaded(folder: Path) -> None:
    (folder / "slow_one.py").write_text("raise AssertionError('loaded')")
    require_package("test", "slow_one", "slow-one")
    assert "slow_one" not in sys.modules
    with pytest.raises(
        TuningError,
        match="needs the package fast-one, which is not installed: run pip install fast-one, or do not select",
    ):
        require_package("test", "fast_one", "fast-one")


@pytest.mark.lengthy
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
    assert import_late("slow_d").__name__ == "slow_d"


SPACE = KnobSpace(routes=((TransportKind.GLOO, Algorithm.FLAT), (TransportKind.MPI, Algorithm.FLAT)))


def test_a_measured_setting_is_not_proposed_by_any_arm_again() -> None:
    arm = GridArm(SPACE)
    first, second = (proposal.knobs for proposal in arm.ask(2))
    arm.tell([Trial(arm="another", knobs=first, iterations=2, span_s=1.0)])
    assert arm.ask()[0].knobs == second


def test_it_gets_close_to_the_optimum_in_most_runs() -> None:
    best = min(map(span_of, KnobLattice(GPU).points))
    found = []
    for seed in range(10):
        arm = PBTArm(GPU, rng=np.random.default_rng(seed))
        found.append(min(span_of(proposal.knobs) for proposal in converse(arm, 40)))
    assert np.median(found) <= 1.05 * best


def test_it_proposes_nothing_twice_and_ends_with_the_space() -> None:
    arm = PBTArm(ONLY_STREAMS, rng=np.random.default_rng(0))
    proposals = converse(arm, 10)
    assert {proposal.knobs.streams for proposal in proposals} == {1, 3, 5}
    assert len(proposals) == 3
    assert arm.ask() == []


def members_of(arm: PBTArm) -> dict[int, float]:
    """Return number of streams and span of each member."""
    return {WIDE.streams[member.index[1]]: member.span_s for member in arm._members}


def with_members(spans_s: dict[int, float]) -> PBTArm:
    """Return a population of settings with different numbers of streams."""
    arm = PBTArm(WIDE, rng=np.random.default_rng(0), population=len(spans_s))
    arm.tell([measured(streams, span_s, arm="somebody else") for streams, span_s in spans_s.items()])
    return arm


def measured(streams: int, span_s: float, *, arm: str) -> Trial:
    knobs = KnobLattice(WIDE).points[0].but(streams=streams)
    return replace(trial_of(Proposal(arm=arm, knobs=knobs)), span_s=span_s)


def test_the_worst_member_moves_and_keeps_its_new_setting_even_if_it_is_worse() -> None:
    arm = with_members({1: 1.0, 2: 2.0, 4: 3.0})
    arm.tell([measured(8, 9.0, arm="pbt")])
    assert members_of(arm) == {1: 1.0, 2: 2.0, 8: 9.0}
    arm.tell([measured(16, 1.5, arm="pbt")])
    assert members_of(arm) == {1: 1.0, 16: 1.5, 2: 2.0}


def test_settings_of_other_arms_immigrate_only_if_they_beat_the_worst_member() -> None:
    arm = with_members({1: 1.0, 2: 2.0, 4: 3.0})
    arm.tell([measured(8, 9.0, arm="grid")])
    assert members_of(arm) == {1: 1.0, 2: 2.0, 4: 3.0}
    arm.tell([measured(8, 2.5, arm="grid")])
    assert members_of(arm) == {1: 1.0, 2: 2.0, 8: 2.5}


def hyperband(max_iterations: int = 4) -> HyperbandArm:
    return HyperbandArm(WIDE, rng=np.random.default_rng(0), max_iterations=max_iterations)


def course(arm: HyperbandArm, turns: int) -> dict[Knobs, list[int]]:
    """Return the requested iterations by setting."""
    asked: dict[Knobs, list[int]] = {}
    for _ in range(turns):
        (proposal,) = arm.ask()
        assert proposal.iterations is not None
        asked.setdefault(proposal.knobs, []).append(proposal.iterations)
        arm.tell([trial_of(proposal)])
    return asked


def test_iterations_double_from_one_up_to_the_most() -> None:
    for resources in course(hyperband(max_iterations=5), 60).values():
        assert resources == [1, 2, 4, 5][: len(resources)]


def test_some_settings_end_early_and_the_promoted_are_the_better_ones() -> None:
    asked = course(hyperband(), 120)
    finished = [span_of(knobs) for knobs, resources in asked.items() if resources[-1] == 4]
    dropped = [span_of(knobs) for knobs, resources in asked.items() if resources[-1] < 4]
    assert len(dropped) >= 10
    assert np.median(finished) < np.median(dropped)


def test_a_setting_that_got_fewer_iterations_than_asked_still_waits() -> None:
    arm = hyperband()
    while (proposal := arm.ask()[0]).iterations == 1:
        arm.tell([trial_of(proposal)])
    assert proposal.iterations == 2
    arm.tell([Trial(arm=arm.name, knobs=proposal.knobs, iterations=1, span_s=0.1)])
    assert arm.ask()[0] == proposal


def test_building_the_arm_logs_nothing_and_keeps_optunas_logging(capfd: pytest.CaptureFixture[str]) -> None:
    import optuna

    optuna.logging.set_verbosity(logging.INFO)  # its own; other users of this process may have changed it
    course(hyperband(), 5)
    assert optuna.logging.get_verbosity() == logging.INFO
    assert capfd.readouterr() == ("", "")


@pytest.mark.lengthy
def test_it_proposes_unmeasured_settings_and_finds_fast_ones() -> None:
    arm = ScikitOptimizeArm(WIDE, rng=np.random.default_rng(1))
    asked: list[Proposal] = []
    for _ in range(N_INITIAL + 4):
        asked += arm.ask()
        arm.tell([trial_of(asked[-1])])
    assert len({proposal.knobs for proposal in asked}) == len(asked)
    spans_s = [span_of(proposal.knobs) for proposal in asked]
    assert min(spans_s[N_INITIAL:]) < min(spans_s[:N_INITIAL])


def test_where_nothing_has_run_yet_it_asks_on() -> None:
    arm = ScikitOptimizeArm(WIDE, rng=np.random.default_rng(1))
    for _ in range(3):
        (proposal,) = arm.ask()
        arm.tell([Trial(arm=arm.name, knobs=proposal.knobs, iterations=1, span_s=math.inf, status=TrialStatus.FAILED)])


@pytest.fixture
def arm() -> BayesianArm:
    return BayesianArm(WIDE, rng=np.random.default_rng(0))


def optimum(space: KnobSpace) -> float:
    return min(map(span_of, KnobLattice(space).points))


def test_it_finds_the_best_of_hundreds_of_settings_in_a_few_dozen_trials(arm: BayesianArm) -> None:
    spans = [span_of(proposal.knobs) for proposal in converse(arm, 30)]
    assert len(KnobLattice(WIDE)) > 600
    assert min(spans) <= 1.03 * optimum(WIDE)


def test_it_starts_from_the_measurements_of_other_arms(arm: BayesianArm) -> None:
    arm.tell([trial_of(proposal) for proposal in GridArm(WIDE).ask(25)])
    (first,) = arm.ask()
    assert "promises" in first.reason
    assert span_of(first.knobs) <= 1.5 * optimum(WIDE)


def test_the_expected_improvement_shrinks_with_more_trials() -> None:
    arm = BayesianArm(GPU, rng=np.random.default_rng(0))
    assert arm.expected_improvement() is None
    converse(arm, 8)
    early = arm.expected_improvement()
    converse(arm, 40)
    late = arm.expected_improvement()
    assert early is not None
    assert late is not None
    assert late < early
    assert late < 0.01


def test_a_proposal_is_ready_between_two_iterations(arm: BayesianArm) -> None:
    """Many trials, a wide space: its thread takes 30 ms here; the bound leaves room for slower machines."""
    *known, last = GridArm(WIDE).ask(100)
    arm.tell([trial_of(proposal) for proposal in known])
    arm.ask()
    arm.tell([trial_of(last)])
    begin = time.thread_time()
    arm.ask()
    assert time.thread_time() - begin < 0.4


@pytest.mark.lengthy
def test_unused_arms_import_no_slow_library() -> None:
    program = """
import sys
import numpy as np
from conformance.arm import WIDE
from sirtaki.autotune.meta.bandit import default_arms
default_arms(space=WIDE, rng=np.random.default_rng(0)).ask()
print({"optuna", "scipy.optimize", "scipy.stats"} & set(sys.modules))
"""
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd="tests")
    assert ended.stdout == "set()\n"


def test_it_believes_less_in_a_lucky_measurement_than_in_its_neighbours(arm: BayesianArm) -> None:
    lattice = KnobLattice(WIDE)
    rng = np.random.default_rng(0)
    around = [lattice.at((unit, streams, 0, 0)) for unit in range(4, 20) for streams in (2, 4)]
    lucky = around[14]
    for knobs in around:
        luck = 0.8 if knobs == lucky else float(np.exp(0.05 * rng.standard_normal()))
        arm.tell([trial_of(Proposal(arm="a", knobs=knobs), span_of(knobs) * luck)])
    believed = arm.expected_span_s(lucky)
    assert believed is not None
    assert believed > 0.85 * span_of(lucky)
    assert arm.expected_span_s(lattice.at((0, 0, 0, 0))) is None


def bowl(x_ND: FloatArray, routes_N: IntArray) -> FloatArray:
    """Both routes have their optimum at (0.6, 0.3); the second is slower by a third."""
    values: FloatArray = ((x_ND - np.array([0.6, 0.3])) ** 2).sum(1) + routes_N / 3.0
    return values


def mean_and_deviation(process: GaussianProcess, x_MD: FloatArray, routes_M: IntArray) -> tuple[FloatArray, ...]:
    """Averaged over the hyperparameters."""
    mean_KM, deviation_KM = process.predict(x_MD, routes_M)
    return process.weights @ mean_KM, process.weights @ deviation_KM


def test_another_route_is_expected_to_have_the_same_shape_where_it_has_shown_it() -> None:
    """Only one half of the second route is measured. Its other half rises as on the first route."""
    grid = np.linspace(0.0, 1.0, 9)
    x_ND = np.array([[x, 0.5] for x in (*grid, *grid[:5])])
    routes_N = np.array([0] * 9 + [1] * 5)
    y_N = np.abs(x_ND[:, 0] - 0.5) + routes_N / 3.0
    process = GaussianProcess(x_ND, routes_N, y_N, np.ones(14), noise=0.01, repetitions=20.0)
    mean_M, _ = mean_and_deviation(process, np.array([[0.5, 0.5], [0.9, 0.5]]), np.array([1, 1]))
    assert mean_M[1] - mean_M[0] > 0.15


def test_repetitions_determine_the_noise() -> None:
    """Scatter around a bowl is noise if repetitions scatter as much, and a rough landscape if they agree."""
    rng = np.random.default_rng(3)
    x_ND, routes_N = rng.random((30, 2)), np.zeros(30, dtype=int)
    y_N = bowl(x_ND, routes_N) + 0.1 * rng.standard_normal(30)

    def follows(noise: float) -> float:
        process = GaussianProcess(x_ND, routes_N, y_N, np.ones(30), noise=noise, repetitions=30.0)
        mean_N, _ = mean_and_deviation(process, x_ND, routes_N)
        return float(np.abs(mean_N - y_N).mean())

    assert follows(noise=0.01) < 0.5 * follows(noise=0.1)


def test_points_that_all_take_the_same_are_no_trouble() -> None:
    x_ND = np.random.default_rng(0).random((60, 3))
    process = GaussianProcess(
        x_ND, np.zeros(60, dtype=int), np.full(60, -3.0), np.full(60, 20.0), noise=1e-9, repetitions=1e3
    )
    mean_N, deviation_N = mean_and_deviation(process, x_ND, np.zeros(60, dtype=int))
    assert np.allclose(mean_N, -3.0, atol=0.01)
    assert np.isfinite(deviation_N).all()
