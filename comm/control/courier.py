"""Short messages between ranks, beside the collectives: sent at any time, read when somebody looks."""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from enum import IntEnum
from typing import Any

from .communicator import Communicator


class Tag(IntEnum):
    """What a message is about, and with it who reads it."""

    WHERE = 1
    """The watchdog asks where a rank is."""
    HERE = 2
    """The answer to that."""
    LOST = 3
    """The job is lost."""
    LEAVING = 4
    """The sender needs the others no more."""
    JOINED = 5
    """The sender has called `join()`."""
    ITERATION = 6
    """The sender takes part in an iteration of an optimizer, in which the receiver, which has joined, is missing."""
    BLOCKED = 7
    """What the sender waits for, which may be the receiver."""


class Courier:
    """Carries small picklable messages; any thread may use it, and no call waits for another rank."""

    def __init__(self, comm: Communicator) -> None:
        """Keeps `comm`, a duplicate that nobody else uses; its owner frees it."""
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._lock = threading.Lock()
        self._received: defaultdict[Tag, list[tuple[int, Any]]] = defaultdict(list)

    def send(self, rank: int, tag: Tag, message: Any = None) -> None:
        """Sends a message (Any: whatever can be pickled) to another rank; messages of one sender keep their order."""
        with self._lock:
            self._comm.post(rank, tag, pickle.dumps(message))

    def send_all(self, tag: Tag, message: Any = None) -> None:
        """Sends a message to all other ranks."""
        for rank in range(self.size):
            if rank != self.rank:
                self.send(rank, tag, message)

    def receive(self, tag: Tag) -> list[tuple[int, Any]]:
        """What has come under this tag since the last call: the senders' ranks and their messages, in order."""
        with self._lock:
            while (posted := self._comm.collect()) is not None:
                source, what, message = posted
                self._received[Tag(what)].append((source, pickle.loads(message)))
            return self._received.pop(tag, [])
