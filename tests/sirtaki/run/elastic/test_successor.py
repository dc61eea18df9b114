"""What a driver leaves behind says all that the next one needs, as JSON."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sirtaki.comm.control.mesh_rendezvous import listen
from sirtaki.run.elastic import successor
from sirtaki.run.elastic.agent_crew import AgentStart, ElasticJob
from sirtaki.run.elastic.job_members import OnFailure, Policy

POLICY = Policy(start_ranks=3, min_ranks=2, max_ranks=4, on_failure=OnFailure.DROP_HOST, cooldown_s=(1.0, 2.0))
JOB = ElasticJob(
    command=("python", "x.py"), environ={"HERE": "1"}, carried={"A": "b"}, interface="eth0", one_host=False,
    agents=AgentStart(template="do {command}", slurm_hosts=frozenset({"n1"}), ssh=("-p", "22")), agent_start_s=9.0,
)  # fmt: skip


@pytest.mark.parametrize("script", [None, "/hosts.sh"])
def test_it_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None) -> None:
    successor_config = successor.successor_config_of(
        JOB, POLICY, script=script, slots=2, hosts={"a": 1}, timestamps=False, folder=tmp_path
    )
    (listener,) = listen(["127.0.0.1"])
    told = {
        "successor_config": successor_config, "environ": {"A": "b"}, "secret": "s", "job": "j",
        "listeners": [listener.detach()], "agents": [2, 3], "numbers": 7,
    }  # fmt: skip
    seen = {}

    class Driver:
        def __init__(self, crew, members, output) -> None:
            seen.update(policy=members.policy)

        def take_over(self, hosts, ask) -> int:
            seen.update(hosts=hosts, ask=ask)
            return 5

    monkeypatch.setattr(successor, "Driver", Driver)
    monkeypatch.setattr(successor, "AgentCrew", lambda job, own, pump: seen.update(job=job, endpoint=own))
    monkeypatch.setattr(
        successor, "ElasticOutput", lambda **shown: seen.update(shown=shown) or SimpleNamespace(pump=None)
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(told)))
    assert successor.main() == 5
    assert seen["policy"] == POLICY
    assert (seen["shown"]["prefix"], seen["shown"]["timestamps"], seen["shown"]["folder"]) == (True, False, tmp_path)
    job, endpoint = seen["job"], seen["endpoint"]
    assert (job.command, job.carried, job.interface, job.agents) == (JOB.command, JOB.carried, "eth0", JOB.agents)
    assert job.environ["A"] == "b"
    assert job.successor_config == json.loads(json.dumps(successor_config))
    assert (endpoint.name, endpoint.secret, endpoint.agents, endpoint.numbers) == ("j", "s", (2, 3), 7)
    assert seen["hosts"] == {"a": 1}
    assert (seen["ask"] is None) == (script is None)
    for sock in endpoint.listeners:
        sock.close()
