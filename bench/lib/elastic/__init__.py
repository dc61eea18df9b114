"""Jobs whose processes are killed one by one, what they write down, and what must hold of that."""
