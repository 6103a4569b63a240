"""Tests of the in-process runtime again: one Ray cluster computes the same."""

import pytest
from ray_contexts import in_process_context  # noqa: F401
from ray_contexts import native_context  # noqa: F401
from test_in_process_algorithms import test_algorithm_of_tff  # noqa: F401
from test_in_process_algorithms import test_algorithm_of_this_package  # noqa: F401
from test_in_process_algorithms import tff_problem  # noqa: F401
from test_in_process_arguments import test_accepts_what_native_accepts  # noqa: F401
from test_in_process_arguments import test_more_is_accepted  # noqa: F401
from test_in_process_intrinsics import test_result  # noqa: F401
from test_in_process_secure import test_factories  # noqa: F401
from test_in_process_secure import test_select  # noqa: F401

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings('ignore:Secure aggregation:UserWarning'),
]
