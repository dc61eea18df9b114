"""Moves gradients. Knows plans, nothing of tuning; may import `sirtaki.errors` and nothing else of Sirtaki."""
