"""`sirtaki …`: the command line."""
