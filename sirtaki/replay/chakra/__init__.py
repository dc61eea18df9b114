"""A recording as Chakra execution traces, which ASTRA-sim and others read: one file a rank."""
