"""A rank's connection to the agent that has started it, and what the rank loads before it joins."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sirtaki.comm.control.mesh_rendezvous import Appointment, Attendee, Meeting, attendee, open_places
from sirtaki.errors import CommError, ConfigError
from sirtaki.json_channel import JsonChannel
from sirtaki.launchers import AGENT

from .membership import Change, Dismissed, Generation, Member


def load_what_training_needs() -> None:
    """Loads what PyTorch loads with the first optimizer only, and takes as long as PyTorch itself; again is harmless.

    Does nothing where PyTorch is not loaded.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


_NO_CHANGE = Change(0)

LONG_S = 10.0
"""Who computes for longer without looking for changes says so, lest it be taken for one that stands still."""


def name_of(job: str, generation: Mapping[str, Any]) -> str:
    """Under which the members of a generation meet: nobody else may who was told of another one of its number."""
    places = json.dumps([each["places"] for each in generation["attendees"]])
    return f"{job}/{generation['number']}/{hashlib.sha256(places.encode()).hexdigest()[:16]}"


class Heard:
    """What the agent has said, as far as nobody has asked.

    Attributes:
        change: since the present generation began.
        lost: which member has died first; "" = none.
    """

    def __init__(self) -> None:
        self.change, self.lost = _NO_CHANGE, ""

    def answer(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """To the question for the next generation, if it is among them: what came before it is of the one before."""
        for number, message in enumerate(messages):
            if message.get("is") in ("generation", "dismissed"):
                self.change, self.lost = _NO_CHANGE, ""
                self.note(messages[number + 1 :])
                return message
        return None

    def note(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """While nothing has been asked."""
        for message in messages:
            if message.get("is") == "change":
                self.change |= Change(message["change"])
                self.lost = self.lost or message["lost"]


class AgentClient:
    """The membership of a rank, as the agent of its host knows it."""

    def __init__(self, sock: socket.socket, *, interface: str | None, one_host: bool = False) -> None:
        """The socket becomes its own.

        Args:
            sock: connected to the agent.
            interface: name of the network interface that joins the hosts; None = any.
            one_host: the job will never have another host.
        """
        self._channel = JsonChannel(sock)
        self._interface, self._one_host = interface, one_host
        self._heard = Heard()
        self._looked_s, self._longest_s = time.monotonic(), LONG_S

    def join(self, *, after: int, has_state: bool, timeout_s: float) -> Generation:
        """See `Membership`."""
        self._look()
        deadline_s = time.monotonic() + timeout_s
        if after == 0:
            load_what_training_needs()
        listeners = open_places(self._interface, loopback_only=self._one_host)
        try:
            own = attendee(listeners)
            places = {"host": own.host, "places": own.places}
            self._channel.send({"ask": "join", "after": after, "has_state": has_state, "attendee": places})
            answer = self._wait_for_answer(deadline_s)
            if answer["is"] == "dismissed":
                raise Dismissed("this rank is not wanted any more")
            return self._generation(answer, listeners)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise

    def change(self) -> Change:
        """See `Membership`."""
        with contextlib.suppress(ConnectionError):  # whoever asks for the next generation is told
            self._heard.note(self._channel.receive())
        self._look()
        return self._heard.change

    def finished(self) -> None:
        """See `Membership`."""
        self._channel.send({"ask": "finished"})

    def close(self) -> None:
        """The rank is a member of nothing any more."""
        self._channel.close()

    def _look(self) -> None:
        """Says how long this rank has not looked, if it never took so long before."""
        now_s = time.monotonic()
        looked_s, self._looked_s = self._looked_s, now_s
        if now_s - looked_s > self._longest_s:
            self._longest_s = now_s - looked_s
            self._channel.send({"ask": "patience", "seconds": float(round(self._longest_s, 1))})

    def _wait_for_answer(self, deadline_s: float) -> Mapping[str, Any]:
        while (left_s := deadline_s - time.monotonic()) > 0:
            select.select([self._channel], [self._channel] if self._channel.has_unsent else [], [], left_s)
            self._channel.flush()
            try:
                messages = self._channel.receive()
            except ConnectionError as err:
                raise CommError(f"the agent of this host is gone ({err})") from err
            if (answer := self._heard.answer(messages)) is not None:
                self._looked_s = time.monotonic()
                return answer
        raise CommError("the other ranks of the next generation did not come in time")

    def _in_vain(self) -> str:
        self.change()
        return self._heard.lost

    def _generation(self, answer: Mapping[str, Any], listeners: tuple[socket.socket, ...]) -> Generation:
        attendees = tuple(map(Attendee.of_json, answer["attendees"]))
        appointment = Appointment(
            attendees=attendees, secret=answer["secret"], listeners=listeners, in_vain=self._in_vain
        )
        number, members = answer["number"], answer["members"]
        return Generation(
            number=number,
            members=tuple(Member(host=host, slot=slot, is_new=is_new) for host, slot, is_new in members),
            meeting=Meeting(
                rank=answer["rank"], size=len(members), name=name_of(answer["job"], answer), appointment=appointment
            ),
        )


def open_agent(*, interface: str | None, environ: Mapping[str, str] = os.environ) -> AgentClient | None:
    """The membership of this process; None where no agent has started it.

    Raises:
        ConfigError: this process has inherited the variable, but not the socket: a script has started it.
    """
    text = environ.get(AGENT, "")
    if not text:
        return None
    descriptor, _, hosts = text.partition(",")
    try:
        sock = socket.socket(fileno=int(descriptor))
        sock.getpeername()
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"{AGENT}={text}, but this process has no socket of that number: is it one that a rank has started? Only "
            "the rank itself may call init() in an elastic job"
        ) from err
    sock.set_inheritable(False)
    return AgentClient(sock, interface=interface, one_host=hosts == "one")
