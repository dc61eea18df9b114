"""Connects `comm`, `autotune` and `registry`: the job, the gradient reducer, the warm-up, the tuning cache."""
