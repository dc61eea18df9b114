"""The page that `sirtaki report` makes of a recording."""
