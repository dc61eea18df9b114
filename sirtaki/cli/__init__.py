"""The `sirtaki` command line."""
