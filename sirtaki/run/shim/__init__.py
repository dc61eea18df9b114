"""Folder that `--as-horovod` prepends to PYTHONPATH. It contains a package `horovod`, which hides an installed
Horovod.
"""
