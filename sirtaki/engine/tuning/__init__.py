"""Tuning while the job trains: trials, plans, the trial log and the registry."""
