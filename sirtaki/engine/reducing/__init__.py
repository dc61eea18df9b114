"""Layer between autograd and the gradient pipeline: hooks on parameters, iterations, parameters of two optimizers."""
