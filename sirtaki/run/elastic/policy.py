"""What the user has decided about a job whose ranks come and go, and the limits that are ours."""

from dataclasses import dataclass
from enum import Enum

COOLDOWN_S = (30.0, 600.0)
"""How long a host is left out where failed ranks are replaced in place, unless the user says otherwise."""


class OnFailure(Enum):
    """What becomes of the place of a rank that has failed."""

    REPLACE_RANK = "replace-rank"
    DROP_HOST = "drop-host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What holds for the whole job.

    Attributes:
        start_ranks: how many the first generation waits for.
        min_ranks: below it nobody goes on.
        max_ranks: above it nobody is started; None = as many as there are slots.
        timeout_s: how long to wait for enough ranks.
        reset_limit: how many generations may follow the first one; None = any number.
        on_failure: what becomes of a failed rank's place.
        cooldown_s: shortest and longest time that a dropped host is left out; None = for good.
        leave_s: how long a member may take to ask for the next generation after another one has (or twice the longest
            time that any rank has computed without looking for changes, up to `timeout_s`), and a rank that is
            dismissed to end; then it is killed.
        start_grace_s: how long the first generation waits for ranks that are starting, once enough are there.
        strikes: failures in a row, of ranks that had not trained for long, after which a host is dropped.
        has_heirs: where the driver is lost an agent starts another one, so that of two sides one has to end.
        hosts_stay: there will never be others.
        settled_s: a rank that has trained for so long has cleared its host's failures.
    """

    start_ranks: int
    min_ranks: int
    max_ranks: int | None = None
    timeout_s: float = 600.0
    reset_limit: int | None = None
    on_failure: OnFailure = OnFailure.REPLACE_RANK
    cooldown_s: tuple[float, float] | None = None
    leave_s: float = 30.0
    start_grace_s: float = 10.0
    strikes: int = 3
    settled_s: float = 60.0
    has_heirs: bool = False
    hosts_stay: bool = False
