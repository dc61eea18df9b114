"""Layer between autograd and the gradient pipeline: hooks, iterations, and sharing between optimizers."""
