"""The bandit over the arms, and the warm-up session."""
