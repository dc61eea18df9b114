"""Analytical models: fits of measured times, and the simulator of one iteration."""
