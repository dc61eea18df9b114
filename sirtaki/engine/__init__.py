"""The engine of a job: connects its ranks, reduces gradients, tunes their communication, and stores tuning results."""
