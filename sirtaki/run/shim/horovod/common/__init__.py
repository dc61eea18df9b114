"""`horovod.common`: aliases of Sirtaki's modules (see `sirtaki.run.as_horovod`)."""
