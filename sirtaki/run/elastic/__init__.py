"""Launch elastic jobs: a driver (the launcher), an agent process on each host, host discovery, and membership rules."""
