"""Launching of elastic jobs: a driver, an agent on each host, host discovery, and the membership rules."""
