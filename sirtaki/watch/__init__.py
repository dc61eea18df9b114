"""What a job tells those who watch it: iterations, trials, decisions, generations. `docs/how-to/watch.md`."""

from .watchers import Decision, GenerationBegun, IterationEnded, TensorBoard, TrialEnded, Watcher, add, remove

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
