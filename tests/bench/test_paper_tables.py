import json
import sys

import pytest

from bench import paper_tables
from bench.lib.workloads import workload
from bench.paper_tables import TABLE_V, largest_speedup, layer_wise, libra_throughputs


@pytest.mark.parametrize("name", TABLE_V)
def test_the_papers_largest_speedups_follow_from_its_other_numbers(name):
    assert largest_speedup(name) == pytest.approx(TABLE_V[name][0], rel=0.01)


def test_layer_wise_messages_keep_bytes_and_compute():
    whole, layers = workload("resnet152"), layer_wise(workload("resnet152"))
    assert len(layers.layout.sizes) == 155 + 155 + 1  # convolutions, normalisations, one linear layer
    assert layers.layout.numel == whole.layout.numel
    assert sum(layers.compute_shares) == pytest.approx(1)


def test_without_contention_no_thread_of_mg_wfbp_slows_the_computation():
    throughputs = libra_throughputs("xception", 64)
    assert throughputs["MG-CF"] > throughputs["MG-N"]
    assert throughputs["LIBRA"] > throughputs["H-N"]


def test_every_method_of_figure_9_is_slower_on_more_nodes_and_no_faster_than_a_single_node():
    few, many = (libra_throughputs("bert_base", nodes) for nodes in (16, 512))
    assert all(many[method] < few[method] <= 1 for method in few)
    assert few["SE"] == min(few.values())


@pytest.mark.slow
def test_the_command_writes_each_prediction_beside_the_paper_and_fails_a_check_that_is_missed(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / "tables.json"
    monkeypatch.setattr(sys, "argv", ["paper_tables", "--quick", "--check", "--json", str(path)])
    status = paper_tables.main()
    report = json.loads(path.read_text())
    assert status == (1 if any(not bar["met"] for bar in report["bars"]) else 0)
    beside = [row for row in report["rows"] if row["paper"] is not None]
    assert len(beside) >= 2 * 12 + 4 + 2 + 10  # tables IV and V; LIBRA's and AIACC's figures
    assert all(row["error_percent"] == pytest.approx(100 * (row["predicted"] / row["paper"] - 1)) for row in beside)
    assert "bert_base, MG-WFBP" in capsys.readouterr().out
