"""Hypothesis profiles: `dev` (default), `ci` and `nightly`; choose with HYPOTHESIS_PROFILE."""

import os

from hypothesis import HealthCheck, settings

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # shared machines stall
settings.register_profile("dev", calm, max_examples=50)
settings.register_profile("ci", calm, max_examples=200, derandomize=True, print_blob=True)
settings.register_profile("nightly", calm, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
