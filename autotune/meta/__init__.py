"""The bandit that chooses among search algorithms (arms), and the tuning session of the warm-up."""
