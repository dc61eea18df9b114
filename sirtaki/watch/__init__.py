"""Events of a job for watchers: iterations, trials, decisions, generations. See `docs/how-to/watch.md`."""

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
