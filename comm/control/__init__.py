"""The control plane: the ranks and their communicators, failures, and the watchdog."""
