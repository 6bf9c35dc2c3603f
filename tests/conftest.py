"""How many examples property tests try: some hundreds, or ten thousand with `pytest --hypothesis-profile nightly`."""

from hypothesis import HealthCheck, settings

settings.register_profile("everyday", max_examples=150, deadline=None)
settings.register_profile(
    "nightly", max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("everyday")
