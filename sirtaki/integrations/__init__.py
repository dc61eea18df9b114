"""Sirtaki inside jobs of Lightning and Ray, and translation of plain PyTorch scripts (`translate`)."""
