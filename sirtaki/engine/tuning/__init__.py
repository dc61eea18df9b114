"""Tuning of communication while the job trains: trials of settings, their log, and the registry of earlier results."""
