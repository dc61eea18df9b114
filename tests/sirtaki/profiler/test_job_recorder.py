"""Jobs are recorded from within, on all ranks at the same steps."""

from types import SimpleNamespace

import pytest
from rank_jobs import OVER_MESH, UNTUNED, Job, Play, RankCase, on_ranks, slow

from sirtaki.analysis import recorder as job_recorder
from sirtaki.analysis.recorder import JobRecorder, Stage
from sirtaki.comm.plan import Algorithm, Route, TransportKind
from sirtaki.measures import LinkModel
from sirtaki.settings import ProfileRequest

SHORT_WARMUP = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "3"}


@on_ranks("profiled", slow(Job(2, env=UNTUNED)), Job(3, env={**UNTUNED, **OVER_MESH, "SIRTAKI_TRANSPORT": "gloo"}))
def test_a_job_is_recorded(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


@on_ranks("profiled", Job(3, env={**UNTUNED, "SIRTAKI_TEST_SUBSETS": "1"}), cases="SUBSETS")
def test_a_job_with_process_sets_is_recorded(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


def test_nothing_is_written_if_it_never_began(tmp_path, caplog) -> None:
    recorder = JobRecorder(ProfileRequest(folder=str(tmp_path / "recorded")))
    recorder.end()
    recorder.end()
    assert recorder.stage is Stage.ENDED
    assert caplog.text.count("nothing was recorded") == 1
    assert not (tmp_path / "recorded").exists()


def test_only_routes_in_use_that_no_warm_up_knows_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, mpi = ((kind, Algorithm.FLAT) for kind in (TransportKind.GLOO, TransportKind.MPI))
    in_use = [SimpleNamespace(knobs=SimpleNamespace(route=route), router=route) for route in (gloo, mpi, mpi)]
    probed: list[Route] = []

    def probe(control: object, router: object, routes: list[Route], **_: object) -> dict[Route, list[object]]:
        assert routes == [router]
        probed.extend(routes)
        return {route: [] for route in routes}

    link = LinkModel(alpha_s=0.001, throughput=(1e9,))
    monkeypatch.setattr(job_recorder, "_of_all_ranks", lambda job: in_use)
    monkeypatch.setattr(job_recorder, "probe_routes", probe)
    monkeypatch.setattr(job_recorder, "fitted_links", lambda probes: dict.fromkeys(probes, link))
    found = job_recorder._links(SimpleNamespace(control=None), {gloo: link})  # type: ignore[arg-type]
    assert (probed, found) == ([mpi], {gloo: link, mpi: link})
