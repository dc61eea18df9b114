"""Descriptors and threads of this process: how many are left, and how many streams fit into them.

A stream that does not fit must be noticed before it is opened: what fails in the middle leaves other ranks waiting, and
Gloo's own threads end the process if they get no descriptor.
"""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass

SHARE = 0.5
"""Of the descriptors that are free, what streams may take; data loaders, files and sockets want some, too."""

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCost:
    """What one stream takes of this process."""

    descriptors: int = 0
    threads: int = 0

    def __add__(self, other: StreamCost) -> StreamCost:
        return StreamCost(descriptors=self.descriptors + other.descriptors, threads=self.threads + other.threads)

    def __mul__(self, streams: int) -> StreamCost:
        return StreamCost(descriptors=self.descriptors * streams, threads=self.threads * streams)


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open descriptors to the hard one; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A hard limit above what the kernel permits now is left as it is.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def descriptors_for_streams() -> int:
    """How many more descriptors streams may take."""
    try:
        in_use = len(os.listdir("/proc/self/fd"))
    except OSError:  # no /proc, or no descriptor to read it with
        in_use = descriptor_limit() // 2
    return max(0, int(SHARE * (descriptor_limit() - in_use)))


def streams_within(descriptors: int, cost: StreamCost, *, most: int) -> int:
    """How many streams fit into so many descriptors, at most `most`; 1 is always tried."""
    return max(1, min(most, descriptors // cost.descriptors)) if cost.descriptors else most


@contextlib.contextmanager
def held(cost: StreamCost) -> Iterator[str]:
    """Takes so many descriptors and threads while the context lasts, to find out whether they can be had.

    Yields:
        What cannot be had, in words; empty if all can.
    """
    descriptors: list[int] = []
    threads: list[threading.Thread] = []
    release = threading.Event()
    problem = ""
    try:
        try:
            # Those that could be had are in the list, too, if the next one cannot.
            descriptors.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(cost.descriptors))
        except OSError as err:
            problem = f"{cost.descriptors} more descriptors cannot be had ({err}; the limit is {descriptor_limit()})"
        try:
            for _ in range(cost.threads):
                thread = threading.Thread(target=release.wait, name="sirtaki-held", daemon=True)
                thread.start()
                threads.append(thread)
        except (RuntimeError, MemoryError) as err:
            problem = problem or f"{cost.threads} more threads cannot be started ({err})"
        yield problem
    finally:
        release.set()
        for descriptor in descriptors:
            os.close(descriptor)
        for thread in threads:
            thread.join()
