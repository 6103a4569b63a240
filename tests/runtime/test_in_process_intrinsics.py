"""The in-process runtime's results, against plain values and TFF's runtime."""

import inspect

import comparison
import federated_cases
import numpy as np
import pytest
import tensorflow_cases
import tensorflow_federated as tff


def _cases_of(module):
  return [
      function
      for name, function in inspect.getmembers(module, inspect.isfunction)
      if not name.startswith('_')
  ]


def _as_result(value, type_spec):
  """Converts lists of numbers to arrays where the type has a tensor."""
  if isinstance(type_spec, tff.FederatedType):
    if type_spec.all_equal or type_spec.placement is tff.SERVER:
      return _as_result(value, type_spec.member)
    return [_as_result(v, type_spec.member) for v in value]
  if isinstance(type_spec, tff.SequenceType):
    return [_as_result(v, type_spec.element) for v in value]
  if isinstance(type_spec, tff.TensorType):
    is_string = type_spec.dtype.type is np.str_
    return np.asarray(value, object if is_string else type_spec.dtype)
  types = [t for _, t in tff.structure.iter_elements(type_spec)]
  if isinstance(value, dict):
    return type(value)(
        (k, _as_result(v, t)) for (k, v), t in zip(value.items(), types)
    )
  if isinstance(value, (list, tuple)) and not hasattr(value, '_fields'):
    return type(value)(map(_as_result, value, types))
  parts = [
      v
      for _, v in tff.structure.iter_elements(
          tff.structure.from_container(value)
      )
  ]
  return type(value)(*map(_as_result, parts, types))


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
  comparison.assert_equal(
      first, _as_result(expected, comp.type_signature.result)
  )
  second = invoke(in_process_context)
  comparison.assert_equal(second, first, same_leaf_types=True)
  if getattr(case, 'is_native', True):
    comparison.assert_equal(first, invoke(native_context), same_leaf_types=True)
