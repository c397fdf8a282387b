"""Hypothesis profiles: `dev` (default), `ci` and `nightly`; choose with HYPOTHESIS_PROFILE."""

import os

from hypothesis import HealthCheck, settings

_calm = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # shared machines stall; that is no failure
settings.register_profile("dev", max_examples=50, **_calm)
settings.register_profile("ci", max_examples=200, derandomize=True, print_blob=True, **_calm)
settings.register_profile("nightly", max_examples=5000, **_calm)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
