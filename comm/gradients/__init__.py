"""Reduction of dense gradients: flat buffers, order of gradients, schedule of units, and the pipeline."""
