"""The flags of the algorithms: which one runs, and the options of some."""

import dataclasses

from tff_bn.catalog import algorithms
from tff_bn.catalog import options
from tff_bn.catalog import value_types
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.flags import first_look

_ALGORITHMS = options.Option(
    'algorithms',
    value_types.List(algorithms.ALGORITHM.values),
    lambda: (
        'What to compare, separated by commas:\n'
        + algorithms.listing_of_names()
    ),
    algorithms.COMPARED,
    default_text=first_look.explain(),
)
_AVERAGE_LAST = options.Option(
    'average_last',
    value_types.POSITIVE_INTEGER,
    'Number of evaluated rounds, counted from the last one, over which the'
    ' table averages',
    5,
    conditions=(
        options.Condition(
            'keep_best',
            lambda flags: flags.keep_best is None,
            'has no effect with --keep_best={}, whose table has the best round',
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class AlgorithmFlags(
    flag_groups.base_class(algorithms.ALGORITHM, *algorithms.OPTIONS)  # type: ignore[misc]
):
  """The algorithm of a run and its options."""

  TITLE = 'Algorithm'


@dataclasses.dataclass(frozen=True)
class ComparisonFlags(
    flag_groups.base_class(_ALGORITHMS, *algorithms.OPTIONS, _AVERAGE_LAST)  # type: ignore[misc]
):
  """The algorithms of a comparison, their options, and the table's."""

  TITLE = 'Algorithms'
