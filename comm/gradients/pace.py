"""How long reductions take against what they took when their setting was chosen, as ranks agree on it."""

from enum import Enum


class Pace(Enum):
    """What a rank says, or what all ranks say."""

    USUAL = "usual"
    """As then; or the ranks do not agree."""
    SLOWER = "slower"
    """Clearly longer, for a while now."""
    FASTER = "faster"
    """Clearly less long, for a while now."""
