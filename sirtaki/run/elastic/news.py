"""What the user is told of a job whose ranks come and go, in words."""

from collections.abc import Collection, Mapping, Sequence

from .workers import Phase, Worker


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def ordinal(number: int) -> str:
    """`1st`, `2nd`."""
    last = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """What discovery has changed, by host its slots."""
    parts = [f"host {host} with {count(slots, 'slot')} is new" for host, slots in after.items() if host not in before]
    parts += [f"host {host} is gone" for host in before if host not in after]
    parts += [
        f"host {host} has {count(slots, 'slot')} instead of {before[host]}"
        for host, slots in after.items()
        if before.get(host, slots) != slots
    ]
    return "; ".join(parts)


def announcement(generation: int, members: Sequence[Worker], new: Collection[int]) -> str:
    """A generation, with its members by rank."""
    hosts = dict.fromkeys(worker.host for worker in members)
    placed = ", ".join(f"{sum(worker.host == host for worker in members)} on {host}" for host in hosts)
    fresh = f", {len(new)} of them new" if 0 < len(new) < len(members) else ""
    return f"generation {generation}: {count(len(members), 'rank')} ({placed}){fresh}"


def with_ranks(lost: Collection[Worker]) -> str:
    """Which ranks are gone with a host; "" = none."""
    ranks = [str(worker.rank) for worker in lost if worker.rank is not None and worker.phase is not Phase.DISMISSED]
    return f" with rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""
