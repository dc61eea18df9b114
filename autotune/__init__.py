"""Decides plans. Knows no process group, no database, no file; may import `sirtaki.comm`'s plan types."""
