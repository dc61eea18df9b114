"""Trials go through JSON unchanged, and what is no trial is refused."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sirtaki.autotune.knobs import MIB, Knobs
from sirtaki.autotune.trial import Trial, TrialStatus
from sirtaki.comm.plan import TransportKind
from sirtaki.errors import TuningError

KNOBS = Knobs(unit_bytes=MIB, streams=2, transport=TransportKind.MPI)

trials = st.builds(
    Trial,
    arm=st.text(min_size=1, max_size=20),
    knobs=st.just(KNOBS),
    iterations=st.integers(0, 100),
    span_s=st.floats(min_value=1e-9, max_value=1e6) | st.just(math.inf),
    noise_s=st.floats(min_value=0.0, max_value=1e6),
    status=st.sampled_from(TrialStatus),
    was_best=st.booleans(),
)


@given(trial=trials)
def test_a_trial_survives_json(trial: Trial) -> None:
    text = json.dumps(trial.to_json(), allow_nan=False)
    assert Trial.from_json(json.loads(text)) == trial


@pytest.mark.parametrize(
    "broken",
    [
        {"span_s": -1.0},
        {"span_s": math.nan},
        {"span_s": "soon"},
        {"noise_s": math.inf},
        {"iterations": -3},
        {"iterations": math.inf},
        {"status": "fine"},
        {"knobs": {"streams": 1}},
        {"knobs": None},
    ],
)
def test_what_is_no_trial_is_refused(broken: dict[str, Any]) -> None:
    good = Trial(arm="grid", knobs=KNOBS, iterations=2, span_s=0.1).to_json()
    with pytest.raises(TuningError, match="trial"):
        Trial.from_json({**good, **broken})
    for field in good:
        with pytest.raises(TuningError, match=field):
            Trial.from_json({name: value for name, value in good.items() if name != field})
