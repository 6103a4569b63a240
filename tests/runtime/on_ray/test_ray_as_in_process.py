"""The tests of the in-process runtime again, on one Ray cluster."""

import pytest
from ray_contexts import in_process_context  # noqa: F401
from test_in_process_algorithms import *  # noqa: F403
from test_in_process_arguments import *  # noqa: F403
from test_in_process_intrinsics import *  # noqa: F403
from test_in_process_secure import *  # noqa: F403

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings('ignore:Secure aggregation:UserWarning'),
]
