"""The ranks and how they agree: the control plane, failures, the watchdog."""
