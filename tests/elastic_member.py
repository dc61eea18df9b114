"""A rank of an elastic job without PyTorch, which starts within tenths of a second.

    elastic_member.py FOLDER

It counts steps together with its peers and takes over their count. It leaves a generation like `hvd.elastic`: at the
next step after a change was announced, or at once if communication fails. The job ends when there is a file
FOLDER/stop. Events are lines of FOLDER/PID.jsonl.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from sirtaki.comm.control.communicator import Communicator, Op
from sirtaki.comm.control.waiting import wait_for
from sirtaki.engine.generations import AgentClient, open_agent
from sirtaki.engine.membership import Dismissed, Generation
from sirtaki.errors import CommError, PeerLostError

STEP_S = 0.01
TIMEOUT_S = float(os.environ.get("SIRTAKI_TEST_TIMEOUT_S", "60"))
HEARTBEAT_S = float(os.environ.get("SIRTAKI_TEST_HEARTBEAT_S", "2"))

FOLDER = Path(sys.argv[1])


def note(**record: object) -> None:
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "at_s": time.time(), **record}) + "\n")


def largest(ranks: Communicator, *values: int) -> list[int]:
    array = np.array(values, dtype=np.int64)
    wait_for(ranks.all_reduce(array, Op.MAXIMUM), failures=ranks.failures)
    return [int(value) for value in array]


class Counter:
    """State of the job: the number of steps."""

    def __init__(self) -> None:
        self.steps, self.has_state = 0, False
        self.longest_s = 0.0

    def train(self, ranks: Communicator, client: AgentClient, generation: Generation) -> bool:
        """Count steps until the generation changes. Return whether the job has ended."""
        (self.steps,) = largest(ranks, self.steps if self.has_state else 0)
        self.has_state = True
        members = [[each.node, each.slot, not each.has_state] for each in generation.membership.members]
        note(
            is_="generation",
            number=generation.membership.generation,
            rank=ranks.rank,
            size=ranks.size,
            steps=self.steps,
            members=members,
        )
        begun_s = time.monotonic()
        while True:
            changed, stops = largest(ranks, client.change().value, (FOLDER / "stop").exists())
            self.steps += 1
            begun_s, step_s = time.monotonic(), time.monotonic() - begun_s
            self.longest_s = max(self.longest_s, step_s)
            if stops:
                return True
            if changed:
                return False
            time.sleep(STEP_S)


def main() -> None:
    if (FOLDER / "with_child").exists():
        subprocess.Popen(["sleep", "300"])
    client = open_agent(interface=None)
    assert client is not None
    counter, number = Counter(), 0
    while True:
        try:
            generation = client.join(after=number, has_state=counter.has_state, timeout_s=TIMEOUT_S)
        except Dismissed:
            note(is_="dismissed")
            return
        number = generation.membership.generation
        ranks = None
        try:
            ranks = generation.connect(timeout_s=30.0, heartbeat_s=HEARTBEAT_S)
            board = ranks.failures
            client.on_loss(lambda lost, board=board: board.report(PeerLostError(lost)))
            if counter.train(ranks, client, generation):
                client.finished()
                note(is_="finished", steps=counter.steps, longest_s=counter.longest_s)
                print(f"finished after {counter.steps} steps", flush=True)
                return
            ranks.free()
        except CommError as err:
            note(is_="failure", number=number, text=str(err))
            if ranks is not None:
                with contextlib.suppress(CommError):
                    ranks.abort("the generation has ended")


main()
