"""Eager collectives on any tensors. Each rank submits them in any order, and ranks match them by name."""
