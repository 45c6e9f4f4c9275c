"""Settings for every test: a slow machine is no failure, so hypothesis sets no deadline."""

from hypothesis import settings

settings.register_profile("kedge", deadline=None)
settings.load_profile("kedge")
