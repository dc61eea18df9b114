"""How trials run inside training."""
