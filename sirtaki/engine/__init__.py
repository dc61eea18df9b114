"""Where `comm`, `autotune` and `registry` meet: the job, the gradient reducer, the warm-up, the tuning cache."""
