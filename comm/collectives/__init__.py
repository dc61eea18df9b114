"""Eager operations: any tensor, any order, agreed by name."""
