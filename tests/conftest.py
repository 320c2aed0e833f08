"""Shared by all tests: hypothesis without deadlines (the machines are shared and noisy)."""

from hypothesis import HealthCheck, settings

settings.register_profile("laconic", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
settings.load_profile("laconic")
