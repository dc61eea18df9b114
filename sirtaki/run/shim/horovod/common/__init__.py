"""`horovod.common`: its modules are Sirtaki's (see `sirtaki.run.as_horovod`)."""
