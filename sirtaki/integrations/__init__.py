"""Sirtaki inside jobs of Lightning and Ray, and the translation of plain PyTorch scripts (`translate`)."""
