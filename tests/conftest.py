"""Settings for all tests."""

from hypothesis import HealthCheck, settings

from laconic import launch

# Workers are forked from a process that has loaded the kernels, which saves each of them half a second.
launch.PRELOAD.append("laconic.preload")

# No deadlines: the time of an example depends on what else the machine does.
settings.register_profile("laconic", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
settings.load_profile("laconic")
