"""Gradients on their way: flat buffers, the schedule of units, their order, and the synchroniser."""
