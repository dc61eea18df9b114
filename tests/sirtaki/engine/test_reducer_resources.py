"""What a reducer is given: the checks and prefixes that settings and options ask for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sirtaki.comm.gradients.buffers import Reduction
from sirtaki.engine.reducing import parameters
from sirtaki.engine.reducing.parameters import ReducerOptions, ReducerResources
from sirtaki.settings import Settings

THE_RANKS = SimpleNamespace(size=1)


def made(options: ReducerOptions | None = None, *, elastic: Any = None, **environ: str) -> ReducerResources:
    members: Any = SimpleNamespace(control=THE_RANKS, engine="the engine")
    job: Any = SimpleNamespace(settings=Settings.from_environ(environ), elastic=elastic)
    return ReducerResources(
        job,
        members,
        options or ReducerOptions(reduction=Reduction(prescale=0.5)),
        prefix="optimizer.3",
        known_sparse=["emb"],
    )


def test_nobody_looks_at_gradients_unless_it_is_asked_for() -> None:
    assert made().nan_check is None
    assert made(SIRTAKI_CHECK_NAN="1").nan_check is not None
    assert not made().start_check.done


def test_known_sparse_gradients_stay_known_from_one_set_of_parameters_to_the_next() -> None:
    resources = made()
    assert resources.control is THE_RANKS
    assert resources.sparse.known == {"emb"}
    for name in ("emb", "other"):
        resources.sparse.watch({name: torch.zeros(1)})
    assert resources.sparse.known == {"emb"}
    dense = made(ReducerOptions(reduction=Reduction(), sparse_as_dense=True))
    assert [each.sparse.looks_new("new") for each in (resources, dense)] == [True, False]


@pytest.mark.parametrize(
    ("elastic", "carried"), [(None, None), (SimpleNamespace(tuning="what is tuned"), "what is tuned")]
)
def test_dense_gradients_get_a_synchroniser_of_their_names_and_what_is_asked_for(
    elastic: Any, carried: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(parameters, "TunedSynchroniser", lambda *args, **more: given.append((args, more)))
    params = [torch.zeros(1), torch.ones(1)]
    options = ReducerOptions(reduction=Reduction(postscale=0.25), arms=())
    made(options, elastic=elastic).make_tuned([("a", params[0]), ("b", params[1])])
    ((control, settings, tensors, names), more) = given[0]
    assert (control, isinstance(settings, Settings), names) == (THE_RANKS, True, ["a", "b"])
    assert tensors[1] is params[1]
    assert more == {"reduction": Reduction(postscale=0.25), "arms": (), "carried": carried, "overlaps": False}


@pytest.mark.parametrize("unused", ["zeros", "none"])
def test_thawed_gradients_are_reduced_as_all_others(unused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(parameters, "reduce_thawed", lambda params, **more: given.append((params, more)))
    params = [torch.zeros(1)]
    made(SIRTAKI_UNUSED=unused).reduce_thawed(params)
    assert given == [
        (
            params,
            {
                "prefix": "optimizer.3.thawed",
                "reduction": Reduction(prescale=0.5),
                "engine": "the engine",
                "unused_as_none": unused == "none",
            },
        )
    ]
