"""Remembers winners. Knows graphs and stores, nothing of communication or tuning."""
