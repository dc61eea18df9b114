"""Remembers winners. Knows graphs and stores, nothing of communication or tuning.

May import `sirtaki.errors` only. Knobs and trials travel through it as JSON; the caller turns them into its own types.
"""
