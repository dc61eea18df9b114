from hypothesis import settings

# The first example of a test pays for its imports, and the machine may be busy: a deadline would judge that.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")
