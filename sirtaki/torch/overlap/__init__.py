"""Updates that are put off into the next forward pass, and what keeps anybody from reading a parameter before that."""
