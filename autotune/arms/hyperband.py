"""Hyperband: many settings measured once, the better ones measured again, by optuna's study and pruner.

After Li et al., Hyperband (JMLR 2018), one of AIACC's four techniques. The resource is the number of measured
iterations: a setting starts with one; while optuna's `HyperbandPruner` lets it live it is proposed again with twice
as many, up to `max_iterations`. The settings themselves are drawn by optuna's TPE sampler, which sees the trials of
all arms. optuna takes a quarter of a second to import, so that waits until the arm is asked for the first time.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..knobs import KnobLattice, Knobs, KnobSpace
from ..trial import Proposal, Trial, TrialStatus
from .base import import_late, require

_AXES = ("unit_bytes", "streams", "threads", "route")
_REDUCTION_FACTOR = 2


class HyperbandArm:
    """An optuna study behind the arms' interface.

    Args:
        space: what may be chosen.
        rng: seeds the sampler.
        max_iterations: measured iterations of a setting that survives to the end.

    Raises:
        TuningError: optuna is not installed.
    """

    def __init__(
        self, space: KnobSpace, *, rng: np.random.Generator, max_iterations: int = 4, name: str = "hyperband"
    ) -> None:
        require(name, "optuna", "optuna")
        self.name = name
        self._lattice = KnobLattice(space)
        self._max_iterations = max_iterations
        self._seed = int(rng.integers(2**31))
        self._optuna: Any = None  # and what follows, until the arm is asked
        self._study: Any = None
        self._distributions: dict[str, Any] = {}
        self._told_early: list[Trial] = []
        # Settings that are under way: their optuna trial and the iterations they shall have next.
        self._pending: dict[Knobs, tuple[Any, int]] = {}
        self._finished: set[Knobs] = set()  # what the sampler has learnt from already

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        """Settings that were promoted and wait for more iterations, then new ones."""
        if self._study is None:
            self._open()
        attempts = 0
        while len(self._pending) < n and attempts < 4 * n:
            attempts += 1
            trial = self._study.ask(self._distributions)
            knobs = self._lattice.at(tuple(int(trial.params[axis]) for axis in _AXES))
            if knobs in self._pending:  # drawn twice before anything was told
                self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
                continue
            self._pending[knobs] = (trial, 1)
        return [
            Proposal(arm=self.name, knobs=knobs, iterations=iterations)
            for knobs, (_, iterations) in list(self._pending.items())[:n]
        ]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Reports to the settings' optuna trials; settings of other arms become finished optuna trials."""
        if self._study is None:
            self._told_early += trials
            return
        for trial in trials:
            under_way = self._pending.get(trial.knobs)
            if under_way is None:
                self._add(trial)
                continue
            optuna_trial, wanted = under_way
            if trial.iterations >= wanted or trial.status is not TrialStatus.COMPLETE:
                del self._pending[trial.knobs]
                self._finished.add(trial.knobs)
                self._report(trial, optuna_trial)

    def _report(self, trial: Trial, optuna_trial: Any) -> None:
        states = self._optuna.trial.TrialState
        if trial.status is TrialStatus.FAILED:
            self._study.tell(optuna_trial, state=states.FAIL)
            return
        optuna_trial.report(np.log(trial.span_s), step=trial.iterations)
        if trial.status is TrialStatus.PRUNED or optuna_trial.should_prune():
            self._study.tell(optuna_trial, state=states.PRUNED)
        elif trial.iterations >= self._max_iterations:
            self._study.tell(optuna_trial, np.log(trial.span_s))
        else:
            promoted = min(_REDUCTION_FACTOR * trial.iterations, self._max_iterations)
            self._pending[trial.knobs] = (optuna_trial, promoted)

    def _add(self, trial: Trial) -> None:
        """What another arm has had measured teaches the sampler."""
        index = self._lattice.index_of(trial.knobs)
        if index is None or trial.status is TrialStatus.FAILED or trial.knobs in self._finished:
            return
        self._finished.add(trial.knobs)
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=dict(zip(_AXES, index, strict=True)),
                distributions=self._distributions,
                value=np.log(trial.span_s),
            )
        )

    def _open(self) -> None:
        self._create_study()
        told, self._told_early = self._told_early, []
        self.tell(told)

    def _create_study(self) -> None:
        (optuna,) = import_late("optuna")
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # creating a study is news to nobody
        try:
            self._optuna = optuna
            self._study = optuna.create_study(
                study_name="sirtaki",  # the pruner's brackets depend on it
                sampler=optuna.samplers.TPESampler(seed=self._seed, n_startup_trials=8),
                pruner=optuna.pruners.HyperbandPruner(
                    min_resource=1, max_resource=self._max_iterations, reduction_factor=_REDUCTION_FACTOR
                ),
            )
        finally:
            optuna.logging.set_verbosity(verbosity)
        distributions = optuna.distributions
        self._distributions = {
            axis: distributions.IntDistribution(0, length - 1)
            if axis != "route"
            else distributions.CategoricalDistribution(range(length))
            for axis, length in zip(_AXES, self._lattice.shape, strict=True)
        }
