"""Layer between autograd and the gradient pipeline: hooks on parameters, iterations, sharing between optimizers."""
