"""The training iterations that a warm-up may take, and how they are shared out between trials and finals."""

from dataclasses import dataclass

RESERVE_PER_NOISE = 7.0  # share of the budget kept for the finals over the noise, within the bounds below
QUIET = 0.015  # noise that needs no reserve
MIN_RESERVE, MAX_RESERVE = 0.15, 0.3
REFINEMENT = 0.12  # share of the budget
SHORT = 60  # iterations below which trials are too few to spend some on neighbours
NOISY = 0.06  # from this noise on, turns in the finals take all the iterations that are left


@dataclass(slots=True, kw_only=True)
class Budget:
    """Iterations in all, and those that are spent.

    Attributes:
        iterations: all of them, discarded ones included.
        discarded: iterations after a change of knobs that are not measured.
        measured: measured iterations of a trial that is not given up early.
        spent: how many have run.
    """

    iterations: int
    discarded: int
    measured: int
    spent: int = 0

    @property
    def turn(self) -> int:
        """What a setting takes that did not run before."""
        return self.discarded + self.measured

    @property
    def duel(self) -> int:
        """What two settings take that run in turns."""
        return 2 * self.turn

    def for_refinement(self, noise: float) -> int:
        """Iterations for neighbours of the fastest setting, of those for trials: none where noise hides them."""
        return 0 if noise > NOISY or self.iterations < SHORT else round(REFINEMENT * self.iterations)

    @property
    def left(self) -> int:
        """Iterations that have not run."""
        return self.iterations - self.spent

    def left_for_trials(self, noise: float) -> int:
        """The others are kept for the finals, the more the noisier it is; negative where they are used already."""
        share = min(max(RESERVE_PER_NOISE * (noise - QUIET), MIN_RESERVE), MAX_RESERVE)
        return self.left - max(self.duel, round(share * self.iterations))

    def turn_iterations(self, noise: float, *, field: int, rounds: int) -> int:
        """Measured iterations of one turn in the finals, if so many are left in the field for so many rounds."""
        if noise <= NOISY:
            return self.measured
        return max(self.measured, self.left // (field * rounds) - self.discarded)
