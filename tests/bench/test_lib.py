"""Common parts of the benchmarks: the emulated cluster, figures and their pages, models and workloads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.lib import harness, ranks
from bench.lib.cluster import LabError, LabShape, NetLab, why_unavailable
from bench.lib.contenders import Contender
from bench.lib.harness import RESULTS, Bar, Report, Spread, alternate, finish, parser, ratios
from bench.lib.models import EmulatedModel, gpt
from bench.lib.ranks import in_turns, take_result
from bench.lib.workloads import NETWORKS, Workload, cluster, workload
from sirtaki.comm.plan import GradientLayout

needs_lab = pytest.mark.skipif(why_unavailable() is not None, reason=f"no emulated cluster: {why_unavailable()}")

# One flow sends for half a second over the loopback of a namespace pair; the receiver prints bytes per second.
RECEIVE = """
import socket, time
server = socket.create_server(("0.0.0.0", 7000)); print("listening", flush=True)
link, _ = server.accept(); link.settimeout(10); received = 0
while time.perf_counter() and (data := link.recv(1 << 16)):
    begin = time.perf_counter() if not received else begin
    received += len(data); end = time.perf_counter()
print(received / (end - begin))
"""
SEND = """
import socket, time
link = socket.create_connection(("10.77.0.2", 7000), timeout=10); end = time.perf_counter() + 0.7
while time.perf_counter() < end: link.send(bytes(1 << 14))
link.close()
"""


def said_on(lab: NetLab, node: int, argv: list[str]) -> str:
    with lab.popen(node, argv, stdout=subprocess.PIPE) as program:
        output = program.communicate(timeout=20)[0]
    assert program.returncode == 0
    return output


def flow_bits_per_s(lab: NetLab) -> float:
    with lab.popen(1, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        said_on(lab, 0, [sys.executable, "-c", SEND])
        return 8 * float(receiver.communicate(timeout=20)[0])


@pytest.mark.parametrize(("user", "tools", "reason"), [(1000, "/usr/bin/x", "need root"), (0, None, "not installed")])
def test_a_machine_that_cannot_emulate_a_cluster_reports_the_reason(monkeypatch, user, tools, reason):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda tool: tools)
    assert reason in (why_unavailable() or "")
    with pytest.raises(LabError, match=reason), NetLab():
        pass


@pytest.mark.integration
@needs_lab
def test_nodes_have_names_and_capped_flows_and_links_can_be_slowed_down_and_nothing_is_left_behind():
    with NetLab(LabShape(nodes=2, link_bits_per_s=80_000_000, flow_bits_per_s=20_000_000)) as lab:
        assert said_on(lab, 1, ["hostname"]) == "sirtaki-n1\n"
        assert 14e6 < flow_bits_per_s(lab) < 26e6
        lab.reshape(LabShape(nodes=2, link_bits_per_s=8_000_000, flow_bits_per_s=8_000_000))
        assert flow_bits_per_s(lab) < 1.1 * 8e6
        sleeper = lab.popen(0, ["sleep", "1000"])
        switch = lab._switch
    assert sleeper.wait(timeout=5) != 0
    assert switch is not None
    assert switch.returncode is not None
    assert "sirtaki" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


@pytest.mark.integration
@needs_lab
def test_an_mpi_job_runs_over_the_nodes_and_a_failing_one_is_an_error():
    rank = "import os; from mpi4py import MPI; c = MPI.COMM_WORLD; print(c.allreduce(1), os.environ['MARK'])"
    with NetLab(LabShape(nodes=2)) as lab:
        output = lab.run_ranks([sys.executable, "-c", rank], ranks_per_node=2, env={"MARK": "here"}, timeout_s=60)
        assert output.split("\n").count("4 here") == 4
        with pytest.raises(LabError, match="ended with status 3"):
            lab.run_ranks(["sh", "-c", "exit 3"], timeout_s=60)
        with pytest.raises(LabError, match="took longer than 1 s"):
            lab.run_ranks(["sleep", "100"], timeout_s=1)


# ── Figures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def a_report(*, value: float) -> Report:
    return Report(
        name="trial",
        rows=[{"what": "a|b", "step_s": Spread.of([0.1, 0.2, 0.3]), "samples_s": [0.1, 0.2, 0.3]}],
        bars=[Bar(claim="the step / the peer's", value=value, limit=1.0)],
        notes=["sizes × 0.25"],
    )


def test_ratios_compare_samples_of_the_same_round():
    assert ratios([1.0, 20.0], [2.0, 40.0]) == Spread.of([0.5, 0.5])


def test_contenders_alternate_and_take_turns_at_being_first():
    order: list[str] = []

    def contender(name: str):
        def measure() -> float:
            order.append(name)
            return float(len(order))

        return measure

    samples = alternate({"a": contender("a"), "b": contender("b")}, rounds=3)
    assert "".join(order) == "abbaab"
    assert samples == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


class OneRank:
    """The communicator of a rank that is alone."""

    def Barrier(self) -> None:
        pass

    def allgather(self, mine):
        return [mine]


def test_turns_have_calls_before_that_do_not_count_and_rows_have_ratios_to_the_peer_of_the_same_round():
    calls: list[str] = []
    contenders = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    samples = in_turns(contenders, OneRank(), rounds=2, block=2, ends={"b": lambda: calls.append("!")})
    assert "".join(calls) == "aaabbb!bbb!aaa"
    assert {name: len(own) for name, own in samples.items()} == {"a": 2, "b": 2}
    report = Report(name="trial")
    report.compare({"a": [1.0, 2.0], "b": [3.0, 8.0]}, "a", where={"case": "x"}, bound_s=0.5, setup={"b": "of b"})
    assert [list(row) for row in report.rows] == [
        ["case", "contender", "step_s", "ratio_to_ddp", "difference", "of_bound", "setup", "samples_s"]
    ] * 2
    assert [row["setup"] for row in report.rows] == [None, "of b"]
    assert report.rows[1]["ratio_to_ddp"] == Spread.of([3.0, 4.0])
    assert [row["difference"] for row in report.rows] == ["", "not proved"]


@pytest.mark.parametrize(
    ("rounds", "ours_s", "said", "met"),
    [
        (6, 0.8, "25.0 % faster, ± 0.0", True),
        (5, 0.8, "not proved", False),
        (6, 1.25, "20.0 % slower, ± 0.0", False),
        (6, 0.95, "5.3 % faster, ± 0.0", False),
    ],
)
def test_a_bar_that_promises_a_difference_is_met_only_if_paired_rounds_prove_it(
    rounds: int, ours_s: float, said: str, met: bool
) -> None:
    samples, report = {"ddp": [1.0] * rounds, "ours": [ours_s] * rounds}, Report(name="trial")
    report.compare(samples, "ddp")
    assert report.rows[1]["difference"] == said
    report.bar_of_pairs("ours / DDP's", samples, "ours", "ddp", 0.9)
    report.bar_of_pairs("ours / DDP's", samples, "ours", "ddp", 1.3)
    assert [bar.met for bar in report.bars] == [met, True]
    assert report.bars[0].value == pytest.approx(ours_s)


@pytest.mark.parametrize(("value", "verdict"), [(0.99, "met"), (1.01, "missed"), (float("nan"), "missed")])
def test_figures_are_kept_with_all_that_they_depend_on(value, verdict, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "RAW", tmp_path / "raw")
    monkeypatch.setattr("sys.argv", ["bench/trial.py", "--save", "--only", "two words", "--check"])
    args = parser("a trial").parse_args(["--save", "--seed", "7"])
    assert finish(a_report(value=value), args) == 0
    assert finish(a_report(value=value), parser("").parse_args(["--check"])) == (verdict == "missed")
    said = capsys.readouterr()
    assert ("missed: the step / the peer's" in said.err) == (verdict == "missed")
    assert "step, ms" in said.out
    assert "200 (150–250)" in said.out
    found = json.loads((tmp_path / "raw" / "trial.json").read_text())
    assert found["rows"][0]["samples_s"] == [0.1, 0.2, 0.3]
    assert found["settings"]["seed"] == 7
    assert {"python", "torch"} <= found["versions"].keys()
    page = (tmp_path / "trial.md").read_text()
    assert page.startswith("# trial\n\n    python -m bench.trial --only 'two words' --check\n")
    assert "- sizes × 0.25" in page
    assert verdict in page
    assert "| what | step, ms |\n|---|---|\n| a\\|b | 200 (150–250) |" in page
    assert "samples" not in page


def test_a_rank_gets_its_options_and_returns_its_result_to_the_process_that_started_it(capsys, monkeypatch):
    ranks.give_result({"samples": [1.5]})
    assert take_result("noise\n" + capsys.readouterr().out + "more noise\n") == {"samples": [1.5]}
    with pytest.raises(RuntimeError, match="without a result: noise"):
        take_result("noise")
    monkeypatch.setattr("sys.argv", ["step.py", *ranks.rank_argv("bench.step", {"rounds": 3})[3:]])
    assert ranks.rank_options() == {"rounds": 3}
    monkeypatch.setattr("sys.argv", ["step.py", "--quick", "--check"])
    assert ranks.rank_options() is None
    assert ranks.rank_env()["SIRTAKI_REGISTRY"] == "off"
    monkeypatch.setenv("SIRTAKI_REGISTRY", "/somewhere.db")
    assert ranks.rank_env()["SIRTAKI_REGISTRY"] == "/somewhere.db"


@pytest.mark.parametrize("path", sorted(RESULTS.iterdir()), ids=lambda path: path.name)
def test_results_are_summaries_of_the_scripts_beside_them(path: Path) -> None:
    assert path.stat().st_size < 40_000
    page = re.match(r"# (\w+)\n\n    python -m bench\.(\w+)[ \n]", path.read_text(encoding="utf-8"))
    assert page is not None
    name, script = page.groups()
    assert path.name == f"{name}.md"
    assert f"{name}_".startswith(f"{script}_")  # all that the script measures, or a part of it
    assert (RESULTS.parent / f"{script}.py").exists()


# ── Models and workloads ─────────────────────────────────────────────────────────────────────────────────────────


def test_gradients_become_ready_in_the_order_and_sizes_of_the_workload_and_weights_show_their_average():
    small = workload("resnet50").scaled(0.001)

    def make() -> tuple[EmulatedModel, torch.Tensor]:
        return EmulatedModel(small, compute_s=0.0, gradient_value=2.0), torch.zeros(1, requires_grad=True)

    contender, ready = Contender(make), []
    for parameter in contender.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: ready.append(parameter.numel()))
    contender.step()
    assert tuple(ready) == small.layout.sizes
    assert len(ready) == 161
    contender.check_average(2.0)
    with pytest.raises(RuntimeError, match="were not averages"):
        contender.check_average(1.5)


def test_the_gpt_learns():
    model, tokens = gpt(rank=0, sequences=2, length=16, elsewhere_s=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]


PUBLISHED = {  # parameters, and gradient tensors where a paper or the reference implementation states them
    "vgg16": (138_357_544, 32),
    "vgg19": (143_667_240, 38),
    "resnet50": (25_557_032, 161),
    "resnet101": (44_549_160, 314),
    "resnet152": (60_192_808, 467),
    "densenet169": (14_149_480, 508),
    "densenet201": (20_013_928, 604),
    "inception_v4": (42_679_816, 449),
    "xception": (22_855_952, None),
    "bert_base": (110_106_428, 206),
    "bert_large": (336_226_108, None),
    "gpt2": (124_439_808, 148),
    "gpt2_medium": (354_823_168, 292),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_construction_rules_give_the_published_networks(name):
    parameters = NETWORKS[name]()
    total, tensors = PUBLISHED[name]
    assert sum(parameter.numel for parameter in parameters) == total
    assert tensors in (None, len(parameters))
    assert len({parameter.name for parameter in parameters}) == len(parameters)
    profile = workload(name).profile(backward_s=0.25)
    assert list(profile.ready_s) == sorted(profile.ready_s)
    assert profile.compute_s == pytest.approx(0.25)


def test_resnet_152_takes_as_long_as_the_asc_wfbp_paper_measured():
    assert workload("resnet152").backward_s == pytest.approx(0.182, rel=0.1)


def test_no_step_is_shorter_than_its_link_and_its_order_of_gradients_allow() -> None:
    layout = GradientLayout(sizes=(10, 30, 60), names=("last", "middle", "first"))
    net = Workload(name="net", layout=layout, compute_shares=(0.5, 0.3, 0.2), backward_s=1.0)
    # A third of 0.3 s is the forward pass; the last layer's gradient comes 0.1 s later, and then all must be sent.
    assert net.shortest_step_s(compute_s=0.3, communication_s=1.0) == pytest.approx(0.1 + 0.1 + 1.0)
    assert net.shortest_step_s(compute_s=0.3, communication_s=0.01) == pytest.approx(0.3 + 0.006)
    # While the last layer computes, in both directions, nothing of any layer is to be sent.
    overlapped = net.shortest_step_s(compute_s=0.3, communication_s=1.0, overlaps_forward=True)
    assert overlapped == pytest.approx(0.15 + 1.0)
    assert net.shortest_step_s(compute_s=0.3, communication_s=0.01, overlaps_forward=True) == pytest.approx(0.306)


def test_three_flows_fill_a_link_capped_at_a_third():
    link = cluster("10 Gbit/s TCP", 8).link()
    assert link.total_bytes_per_s(2) == pytest.approx(2 * link.total_bytes_per_s(1))
    assert link.total_bytes_per_s(3) == pytest.approx(10e9 / 8 / (2 * 7 / 8))
    assert link.total_bytes_per_s(4) < link.total_bytes_per_s(3)
