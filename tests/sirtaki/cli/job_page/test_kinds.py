import pytest

from sirtaki.analysis.job_model import Stretch
from sirtaki.analysis.timeline_plot import COLORS, OF_PHASE, Kind, kind_of
from sirtaki.autotune.model.replayer import Activity, Phase


def stretch(activity: Activity = Activity.COMPUTE, phase: Phase = Phase.BACKWARD, **fields) -> Stretch:
    return Stretch(begin_s=0.0, end_s=1.0, activity=activity, phase=phase, **fields)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (stretch(), Kind.BACKWARD),
        (stretch(Activity.DATA, Phase.DATA), Kind.DATA),
        (stretch(Activity.COPY), Kind.COPY),
        (stretch(phase=Phase.OTHER), Kind.OTHER),
        (stretch(waits=((0, 0, 8),)), Kind.EXPOSED),
        (stretch(waits=((-1, 0, 0), (0, 0, 8))), Kind.EXPOSED),
        (stretch(waits=((-1, 0, 0),)), Kind.COLLECTIVE),
    ],
)
def test_a_moment_is_of_the_kind_that_it_is_spent_on(one: Stretch, kind: Kind) -> None:
    assert kind_of(one) is kind


def test_every_kind_has_a_colour_of_its_own_and_every_phase_a_kind() -> None:
    assert set(COLORS) == set(Kind)
    assert len(set(COLORS.values())) == len(COLORS)
    assert set(OF_PHASE) == set(Phase)
