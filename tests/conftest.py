"""What has to be settled before any test module is imported."""

from __future__ import annotations

import os

from megarl.env import LOCAL_RAY_ENVIRONMENT, RAY_ENVIRONMENT

# Ray reads its environment when it is imported, and collecting the tests imports it before any of them starts one.
os.environ.update({**RAY_ENVIRONMENT, **LOCAL_RAY_ENVIRONMENT})
