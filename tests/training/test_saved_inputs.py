"""Which inputs the Keras files of a run take."""

import pytest

from tff_bn.keras_model import raw_inputs
from tff_bn.training import saved_inputs

_MANIFEST = dict(
    input_shape=[4, 5, 3],
    image_size=[4, 5],
    is_uint8=True,
    divisor=255,
    pixel_scaling=dict(mean=[1, 2, 3], deviation=[4, 5, 6]),
)


def _manifest(export='raw', **changes):
  manifest = {**_MANIFEST, **changes}
  manifest = {k: v for k, v in manifest.items() if v != 'missing'}
  return manifest | dict(keras_inputs=saved_inputs.choose(manifest, export))


def test_raw_samples():
  manifest = _manifest()
  assert saved_inputs.obstacle(manifest) is None
  assert saved_inputs.takes_raw(manifest)
  assert saved_inputs.preparation(manifest) == raw_inputs.Preparation(
      (4, 5, 3), (4, 5), True, 255, [1, 2, 3], [4, 5, 6]
  )


def test_raw_samples_that_are_only_divided():
  manifest = _manifest(
      input_shape=[64], image_size=None, divisor=16, pixel_scaling='missing'
  )
  found = saved_inputs.preparation(manifest)
  assert found == raw_inputs.Preparation((64,), None, True, 16)


def test_samples_of_the_training():
  manifest = _manifest('training')
  assert saved_inputs.obstacle(manifest) is None
  assert not saved_inputs.takes_raw(manifest)
  assert saved_inputs.preparation(manifest) is None


@pytest.mark.parametrize(
    ('changes', 'reason'),
    [
        (dict(divisor=None), "the domains' values were divided by different"),
        (dict(divisor='missing'), 'it is not known how'),
        (dict(input_shape=None), 'it is not known how'),
    ],
)
def test_runs_whose_files_cannot_take_raw_samples(changes, reason):
  manifest = _manifest(**changes)
  assert saved_inputs.obstacle(manifest).startswith(reason)
  assert not saved_inputs.takes_raw(manifest)
  assert saved_inputs.preparation(manifest) is None


def test_models_of_earlier_versions():
  assert saved_inputs.preparation(_MANIFEST) is None
