"""Ranks as Ray's actors, and Ray Train's; scripts import `sirtaki.ray`."""
