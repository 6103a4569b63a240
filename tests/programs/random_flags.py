"""Random texts for the flags of the programs, by the types of their values."""

import functools

from absl import flags as absl_flags
from hypothesis import strategies as st

from tff_bn.catalog import algorithms
from tff_bn.catalog import datasets
from tff_bn.catalog import value_types
from tff_bn.programs.plan import sweeps

# Texts that are wrong for most flags.
_JUNK = st.one_of(
    st.sampled_from(
        [
            *('', ' ', '-', '--', '--seed=1', '=', ',', ',,', '"', '"a', "'"),
            *('+', ':', '(', '[', '{}', '%s', '\\', '*', 'None', 'nan', '-inf'),
            *(
                '1e999',
                '1e-46',
                '0x10',
                '1_0',
                '٣',
                '½',
                'é',
                '😀',
                '\x00',
                'a\n',
            ),
            *('\u2028', '\ud800', '9' * 5000, 'a' * 5000, 'a:b', 'os:getcwd'),
            *('no_such_module:x', 'generated:', 'generated:3:2', 'npz:', '/'),
            *('../..', '~', '~nobody/x', 'domains:', 'x.keras', 'x.npz'),
        ]
    ),
    st.text(max_size=20),
)


def _number(values: value_types.Number):
  """Valid numbers, bounds and their neighbours, and numbers of any size."""
  bounds = [
      bound
      for bound in (values.minimum, values.maximum, values.above, values.below)
      if bound is not None
  ]
  near = [bound + step for bound in bounds for step in (-1, -1e-9, 0, 1e-9, 1)]
  if values.number_type is int:
    number = st.one_of(
        st.integers(0, 12),
        st.integers(),
        st.sampled_from([*bounds, *map(int, near)]),
    )
  else:
    number = st.one_of(
        st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0, 2.0, 10.0]),
        st.floats(),
        st.floats(width=32),
        st.sampled_from([*bounds, *near]),
    )
  return number.map(str)


def _names(known):
  names = st.sampled_from(sorted(map(str, known)))
  return st.one_of(
      names, names, names.map(str.upper), names.map(lambda n: n[1:])
  )


def _dataset():
  path = st.sampled_from(['a.npz', '/tmp/no such', '~/x', 'a,b', 'é', ''])
  kinds = st.sampled_from([kind.prefix for kind in datasets.KINDS.values()])
  return st.one_of(
      _names(datasets.DATASETS),
      st.builds(str.__add__, kinds, path),
      st.sampled_from(
          [
              *('generated:3x3x1:2', 'generated:3:2:9:9', 'tfds:mnist'),
              *('domains:digits', 'domains:a=digits,b=emnist', 'domains:a=,b='),
          ]
      ),
  )


@functools.cache
def texts(values: value_types.ValueType) -> st.SearchStrategy[str]:
  """Texts for a flag with these values: valid, at a bound, wrong, or junk."""
  return st.one_of(*[_likely(values)] * 5, _JUNK)


def _likely(values):
  if isinstance(values, value_types.Number):
    return _number(values)
  if isinstance(values, value_types.Boolean):
    return _names(['true', 'false', 'yes', '0'])
  if isinstance(values, datasets.DatasetName):
    return _dataset()
  if isinstance(values, algorithms.AlgorithmName):
    chains = st.lists(
        _names([*algorithms.ALGORITHMS, *algorithms.CORRECTIONS]),
        min_size=1,
        max_size=2,
    )
    return chains.map('+'.join)
  if isinstance(values, value_types.Choice):
    return _names(values.known)
  if isinstance(values, value_types.Chain):
    return st.builds(
        lambda wrappers, last: '+'.join([*wrappers, last]),
        st.lists(_names(values.wrappers.known), max_size=2),
        _names(values.wrapped.known),
    )
  if isinstance(values, value_types.List):
    joined = st.lists(texts(values.element), max_size=3).map(','.join)
    quoted = st.sampled_from(['"a,b",c', '"c, d"', 'a,"x ""y"""'])
    return st.one_of(joined, joined, quoted)
  if isinstance(values, value_types.RegularExpression):
    return st.sampled_from(['dense.*', 'a|b', '(', '[a', '(?i)x', '*'])
  if isinstance(values, value_types.KerasFile):
    return st.sampled_from(['x.keras', '/no/such.keras', 'é.keras', '.keras'])
  if isinstance(values, sweeps.SweepParser):
    return st.sampled_from(
        [
            *('rounds=1,2', 'rounds=2', 'rounds=', 'seed=1', 'seeds=3', 'x=1'),
            *('gamma=0.5,0.1', '--split=iid,gamma', 'split=iid,gama', 'rounds'),
        ]
    )
  # Image sizes, schedules, checksums and devices.
  return st.sampled_from(
      [
          *('8', '9x8', '0x1', '8x', '99999x2', '3:0.5', '3:0.5,7:0.1', '3:'),
          *('7:1,3:1', '0' * 64, 'A' * 64, '0' * 63, 'cpu:0', 'gpu:1', 'GPU:9'),
          *('7:1', 'name', 'é'),
      ]
  )


@functools.cache
def flags_of(define_flags) -> dict[str, value_types.ValueType]:
  """Returns the types of all flags of a program, by the flags' names."""
  values = absl_flags.FlagValues()
  groups = define_flags(values)
  return {
      name: values[name].parser.values
      for group in groups
      for name in group.names
  }


def arguments(define_flags, max_size: int) -> st.SearchStrategy[dict[str, str]]:
  """Texts of some flags of a program, by the flags' names."""
  types = flags_of(define_flags)
  return st.lists(
      st.sampled_from(sorted(types)), unique=True, max_size=max_size
  ).flatmap(
      lambda names: st.fixed_dictionaries({n: texts(types[n]) for n in names})
  )
