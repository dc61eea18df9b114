"""Sirtaki inside other programs' jobs (Lightning, Ray), and other programs' scripts as Sirtaki's (translate)."""
