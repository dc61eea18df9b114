"""Put first on PYTHONPATH by `--as-horovod`, so that `horovod` here is found before an installed one."""
