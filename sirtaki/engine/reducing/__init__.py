"""The gradients of a job on one rank: hooks, an iteration of a reducer, optimizers and DDP models that use it."""
