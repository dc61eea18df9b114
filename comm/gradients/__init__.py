"""Reduction of dense gradients: flat buffers, order of gradients, launch of units (buckets), and the pipeline."""
