"""Horovod's PyTorch API over `comm`, `autotune` and `registry`: `import sirtaki.torch as hvd`."""
