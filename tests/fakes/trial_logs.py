"""Records of a tuned job, as in its trial log."""

from sirtaki.autotune.knobs import KIB, Knobs
from sirtaki.autotune.model.planning import PlanningModel
from sirtaki.autotune.model.simulator import Profile
from sirtaki.autotune.sparse import SparseAlternative, SparseSummary
from sirtaki.comm.plan import Algorithm, GradientLayout, TransportKind
from sirtaki.measures import LinkModel


def knobs(unit_kib=1024, streams=1, cuts=None):
    return Knobs(unit_bytes=unit_kib * KIB, streams=streams, transport=TransportKind.GLOO, cuts=cuts)


def trial(iteration, arm, setting, span_s, best_s, purpose="trial"):
    return {
        "event": "trial",
        "iteration": iteration,
        "arm": arm,
        "purpose": purpose,
        "knobs": setting.to_json(),
        "spans_s": [span_s, span_s],
        "best_span_s": best_s,
        "auc": {"grid": 0.5, "pbt": 1 / iteration},
    }


RESULT = {
    "event": "result",
    "iteration": 20,
    "arm": "grid",
    "knobs": knobs(512, 4).to_json(),
    "default_span_s": 0.2,
    "best_span_s": 0.1,
    "noise_s": 0.001,
    "n_trials": 4,
    "reason": "the budget was used up",
    "tuned": True,
}
PLANNING = PlanningModel(
    layout=GradientLayout(sizes=(100_000, 200_000)),
    profile=Profile.from_durations([0.01, 0.02]),
    links={(TransportKind.GLOO, Algorithm.FLAT): LinkModel(alpha_s=1e-3, throughput=(1e8, 2e8))},
)
MODEL = {"event": "model", **PLANNING.to_json()}
JOB = [
    trial(3, "default", knobs(25 * 1024), 0.2, 0.2, "default"),
    trial(6, "grid", knobs(512, 4), 0.1, 0.1),
    trial(9, "pbt", knobs(64, 8), 0.3, 0.1),
    trial(12, "<b>bold</b>", knobs(64, 2), None, 0.1),
    RESULT,
]

TABLE = {
    "event": "sparse",
    "iteration": 29,
    **SparseSummary(
        name="table",
        n_rows=200_000,
        width=64,
        ranks=4,
        looked_up=8192.0,
        touched=12_000.0,
        union=9000.0,
        plan="gather",
        ways=(
            SparseAlternative(plan="gather", predicted_s=0.05, measured_s=0.06, n_bytes=2.34e6),
            SparseAlternative(plan="owner", predicted_s=0.04, measured_s=0.07, n_bytes=2.5e6),
        ),
        curve=((1, 0.01), (300, 0.4), (30_000, 1.0)),
        popular_rows=300,
        dense_bytes=76.8e6,
        horovod_bytes=6.49e6,
    ).to_json(),
}


def predicted(record, predicted_s, agreement=0.8, *, believed=True):
    return {**record, "predicted_s": predicted_s, "agreement": agreement, "believed": believed}
