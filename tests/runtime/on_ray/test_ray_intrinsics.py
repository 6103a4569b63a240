"""Every computation that runs in process runs on Ray: the same tests again."""

import pytest
from ray_contexts import in_process_context  # noqa: F401
from test_in_process_intrinsics import *  # noqa: F403

pytestmark = pytest.mark.slow
