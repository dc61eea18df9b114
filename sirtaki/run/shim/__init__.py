"""Folder that `--as-horovod` prepends to PYTHONPATH, so that its `horovod` is imported instead of an installed one."""
