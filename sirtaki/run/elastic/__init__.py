"""Starts jobs whose ranks come and go: a driver, an agent on each host, discovery, and the rules of membership."""
