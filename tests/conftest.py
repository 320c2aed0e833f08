"""Shared by all tests: hypothesis without deadlines (the machines are shared and noisy)."""

from hypothesis import HealthCheck, settings

from laconic import launch

# Workers are forked with the compressors' kernels in place: half a second less for each.
launch.PRELOAD.append("laconic.loaded")

settings.register_profile("laconic", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
settings.load_profile("laconic")
