"""The finals of a warm-up: the fastest settings run in turns with the untuned default, until one of them stays.

The fastest of many noisy measurements is fast by luck too. So the duel with the default counts what is measured here
alone (docs/decisions/0011, 0026).
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..knobs import Knobs
from ..trial import Proposal
from .assignment import DEFAULT_ARM, FINALS_ARM, Assignment, Purpose
from .budget import NOISY
from .ledger import CLEAR, Ledger
from .trials import Trials

INDIFFERENT = 0.001  # share of the span that may be lost by not comparing any further
HOPELESS = 3.0  # standard errors behind the fastest at which a setting has no place in the finals


def finalists(trials: Trials, *, most: int) -> list[Knobs]:
    """The fastest settings and those with the best surrogate's estimate, in turns, but none that is hopeless."""
    ledger, budget = trials.ledger, trials.budget
    ranked = ledger.ranked()
    rivals = [
        setting.knobs
        for setting in ranked
        if not trials.same(setting.knobs, trials.default) and ledger.lead(setting, ranked[0]) > -HOPELESS
    ]
    in_turns = zip(rivals, sorted(rivals, key=trials.believed_s), strict=True)
    field = list(dict.fromkeys(knobs for pair in in_turns for knobs in pair))
    affordable = budget.left // budget.turn - 1  # beside the default
    return field[: max(1, min(most, affordable))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals:
    """How they are held.

    Attributes:
        trials: what has run, and runs here.
        rng: the order of turns.
        arms: whose trials settings are that have not run before.
        max_rounds: after so many the leader is taken.
        max_turn_iterations: measured iterations of one turn at most.
        doubt: the lead that the default must have to stay; an earlier job's winner is proved already and goes only if
            clearly slower.
    """

    trials: Trials
    rng: np.random.Generator
    arms: Mapping[Knobs, str] = field(default_factory=dict)
    max_rounds: int = 8
    max_turn_iterations: int = 12
    doubt: float = 0.0

    def run(self, field: list[Knobs]) -> Generator[Assignment, Sequence[float], Knobs | None]:
        """Rounds of all finalists and the default in random order; the one that is kept, None = the default stays.

        After each round the slower half leaves, by all that was measured of it; where it is noisy the last two stay
        until they are told apart or the budget ends. The default pauses while the duel with it is clear.
        """
        trials, ledger, budget = self.trials, self.trials.ledger, self.trials.budget
        duel = Ledger(identity=trials.identity)
        with_default = True
        for number in range(self.max_rounds):
            noisy = ledger.noise > NOISY
            measured = self._turn_iterations(field, with_default, noisy)
            yield from self._round(field, duel, with_default=with_default, measured=measured, first=number == 0)
            stay = max((len(field) + 1) // 2, 2 if noisy else 1)
            field = sorted(field, key=trials.believed_s)[:stay]
            best = trials.setting(field[0])
            field = [
                knobs
                for knobs in field
                if knobs == best.knobs or ledger.at_stake(best, trials.setting(knobs)) > INDIFFERENT
            ]
            lead = duel.lead(duel[best.knobs], duel[trials.default])
            with_default = abs(lead) < CLEAR
            n_running = len(field) + with_default
            if n_running == 1 or lead <= -CLEAR or n_running * budget.turn > budget.left:
                break
        return best.knobs if lead > -self.doubt else None

    def _turn_iterations(self, field: list[Knobs], with_default: bool, noisy: bool) -> int:
        trials, ledger = self.trials, self.trials.ledger
        beaten = ledger.lead(trials.setting(field[0]), trials.setting(trials.default)) > CLEAR
        halvings = len(field).bit_length() - (noisy and len(field) == 2)
        rounds = max(1, halvings - beaten)  # and a duel if it is open
        longest = trials.budget.turn_iterations(ledger.noise, field=len(field) + with_default, rounds=rounds)
        return min(self.max_turn_iterations, longest)

    def _round(
        self, finalists: list[Knobs], duel: Ledger, *, with_default: bool, measured: int, first: bool
    ) -> Generator[Assignment, Sequence[float], None]:
        trials = self.trials
        field = finalists + [trials.default] * with_default
        turns = self.rng.permutation(len(field)).tolist()
        for i in sorted(turns, key=bool) if first else turns:  # at first the favourite: it may be kept for good
            knobs = field[i]
            known = DEFAULT_ARM if knobs == trials.default else self.arms.get(knobs)
            who = known or trials.setting(knobs).arm
            spans_s = yield from trials.run(knobs, arm=who, purpose=Purpose.FINALS, measured=measured)
            duel.add(knobs, arm=who, spans_s=spans_s)
        for knobs in finalists:
            trials.finish(Proposal(arm=self.arms.get(knobs, FINALS_ARM), knobs=knobs))
