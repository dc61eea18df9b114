"""Jobs are recorded from within, on all ranks at the same steps."""

from rank_jobs import OVER_MESH, UNTUNED, Job, Play, RankCase, on_ranks

from sirtaki.profiler.job_recorder import JobRecorder, Stage, Wanted

SHORT_WARMUP = {"SIRTAKI_REGISTRY": "off", "SIRTAKI_WARMUP_ITERATIONS": "3"}


@on_ranks("profiled", Job(2, env=UNTUNED), Job(3, env={**UNTUNED, **OVER_MESH, "SIRTAKI_TRANSPORT": "gloo"}))
def test_a_job_is_recorded(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


@on_ranks("profiled", Job(3, env={**UNTUNED, "SIRTAKI_TEST_SUBSETS": "1"}), cases="SUBSETS")
def test_a_job_with_process_sets_is_recorded(play: Play, rank_case: RankCase) -> None:
    play(rank_case)


def test_nothing_is_written_if_it_never_began(tmp_path, caplog) -> None:
    recorder = JobRecorder(Wanted(folder=tmp_path / "recorded"))
    recorder.end()
    recorder.end()
    assert recorder.stage is Stage.ENDED
    assert caplog.text.count("nothing was recorded") == 1
    assert not (tmp_path / "recorded").exists()
