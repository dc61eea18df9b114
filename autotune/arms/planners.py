"""All planners in one list: what a session adds to the search techniques once the job has a model."""

from ..knobs import KnobSpace
from ..model.forecast import Forecast
from ..model.planning import PlanningModel
from .asc_wfbp import AscWfbp, AscWfbpN
from .dpro import Dpro
from .libra import Libra, LibraM
from .mg_wfbp import MgWfbp
from .planner import Planner

OUR_PLANNERS: tuple[type[Planner], ...] = (AscWfbpN, Libra, Dpro, AscWfbp, MgWfbp, LibraM)


def make_planners(*, space: KnobSpace, model: PlanningModel | None = None, presumed: bool = True) -> list[Planner]:
    """One of each, the one that did best on the simulated clusters first (`docs/decisions/0020`).

    Without a model they propose nothing; hand it to each by `update_model` when it is known. LIBRA-M takes part
    where there are threads to allocate: elsewhere its plan is MG-WFBP's. Where the model is not `presumed` to be right
    they are silent until trials have borne it out.
    """
    threads = len(space.threads) > 1
    forecast = None if model is None else Forecast(model, presumed=presumed)
    return [
        planner(space=space, model=model, forecast=forecast)
        for planner in OUR_PLANNERS
        if planner is not LibraM or threads
    ]
