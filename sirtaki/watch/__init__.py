"""What a job tells those who watch it: iterations, trials, decisions, generations. `docs/how-to/watch.md`."""

from .events import Decision, GenerationBegun, IterationEnded, TrialEnded, Watcher
from .tensorboard import TensorBoard
from .watchers import add, remove

__all__ = [
    "Decision",
    "GenerationBegun",
    "IterationEnded",
    "TensorBoard",
    "TrialEnded",
    "Watcher",
    "add",
    "remove",
]
