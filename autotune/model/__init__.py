"""Analytical models of communication: fits to measured times, and the simulator of one training iteration."""
