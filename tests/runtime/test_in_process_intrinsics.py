"""The in-process runtime's results, against plain values and TFF's runtime."""

import inspect

import comparison
import federated_cases
import pytest
import tensorflow_cases


def _cases_of(module):
  return [
      function
      for name, function in inspect.getmembers(module, inspect.isfunction)
      if not name.startswith('_')
  ]


@pytest.mark.parametrize(
    'case',
    _cases_of(federated_cases) + _cases_of(tensorflow_cases),
    ids=lambda case: case.__name__,
)
def test_result(case, in_process_context, native_context):
  comp, arguments, expected = case()

  def invoke(context):
    return comparison.as_plain(comparison.invoke(context, comp, *arguments))

  first = invoke(in_process_context)
  comparison.assert_equal(first, expected)
  second = invoke(in_process_context)
  comparison.assert_equal(second, first, same_leaf_types=True)
  if getattr(case, 'is_native', True):
    comparison.assert_equal(first, invoke(native_context), same_leaf_types=True)
