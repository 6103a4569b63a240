"""The options of private sums: secure aggregation, differential privacy."""

from tff_bn.catalog import rules
from tff_bn.catalog import value_types
from tff_bn.catalog.options import Condition
from tff_bn.catalog.options import Option
from tff_bn.catalog.options import declared
from tff_bn.catalog.options import only_for

NONE = 'none'
SECURE_SUM = 'secure_sum'
DP = 'dp'

_FORMS = {
    NONE: 'the server sees what each client sends',
    SECURE_SUM: (
        'the server sees only sums over the clients, rounded and within bounds;'
        ' the cryptography is simulated'
    ),
    DP: (
        'differential privacy at client level: what each client sends is'
        ' clipped, and the sums get normal noise'
    ),
}


def _means_only(options) -> bool:
  return options.privacy == NONE or (
      all(
          getattr(options, name) in ('mean', None) for name in rules.AGGREGATORS
      )
      and not rules.falsifies_values(options.attack)
  )


PRIVACY = Option(
    'privacy',
    value_types.Choice(_FORMS),
    'What protects the weights, updates, statistics and exchanges from which'
    ' the server computes the model:\n'
    + ''.join(f'  {name}: {text}\n' for name, text in _FORMS.items())
    + 'Training metrics are not protected\n',
    NONE,
    conditions=(
        Condition(
            'model_aggregator',
            _means_only,
            'gives the server sums, but rules and attacks need what each client'
            ' sends',
        ),
    ),
    feature=rules.MEAN,
)


def _dp_option(name, values, description, default=None, **more) -> Option:
  """Declares an option of differential privacy, with an argument."""
  return Option(
      name,
      values,
      description,
      default,
      argument=name.removeprefix('dp_'),
      conditions=(only_for(PRIVACY.name, DP),),
      feature=rules.MEAN,
      **more,
  )


NOISE_MULTIPLIER = _dp_option(
    'dp_noise_multiplier',
    value_types.NOT_NEGATIVE,
    'The standard deviation of the noise of a round, divided by the largest'
    ' norm of what a client sends; needed unless --dp_epsilon is given',
    default_text='none',
    excludes='dp_epsilon',
)
EPSILON = _dp_option(
    'dp_epsilon',
    value_types.POSITIVE,
    'ε after all --rounds; the noise follows from it',
    default_text='none',
)
DELTA = _dp_option(
    'dp_delta',
    value_types.PART,
    'δ of (ε, δ), which should be far below one divided by the number of'
    ' clients',
    1e-5,
)
CLIP_NORM = _dp_option(
    'dp_clip_norm',
    value_types.POSITIVE,
    "Largest norm of a client's update of the trained variables",
    1.0,
)
STATISTICS_CLIP_NORM = _dp_option(
    'dp_statistics_clip_norm',
    value_types.POSITIVE,
    "Largest norm of a client's BN statistics, relative to the shared running"
    ' ones, and of what it sends in an exchange of FedTAN',
    1.0,
)
STATISTICS_SHARE = _dp_option(
    'dp_statistics_share',
    value_types.PART,
    'The part of the privacy of a round that BN statistics and exchanges use:'
    ' with the share s, the noise of the update is 1/√(1-s) times as large as'
    ' without statistics, and the noise of the statistics 1/√s times',
    0.1,
)
CLIP_QUANTILE = _dp_option(
    'dp_clip_quantile',
    value_types.PART,
    'Adaptive clipping: the norms follow this quantile of the norms of the'
    ' clients, which costs a tenth of the privacy of a round',
    default_text='none: the norms are fixed',
)


def _secure_option(name, description, default=None, **more) -> Option:
  """Declares a bound of secure sums, with an argument."""
  return Option(
      name,
      value_types.POSITIVE,
      f'{description}; a value out of bounds is clipped, and its client is'
      ' counted',
      default,
      argument=name.removeprefix('secure_'),
      conditions=(only_for(PRIVACY.name, SECURE_SUM),),
      feature=rules.MEAN,
      **more,
  )


UPDATE_BOUND = _secure_option(
    'secure_update_bound',
    "Largest absolute value of a client's update of a variable",
    1.0,
)
STATISTICS_BOUND = _secure_option(
    'secure_statistics_bound',
    "Largest absolute value of a client's BN statistics, relative to the shared"
    ' running ones, and of what it sends in an exchange of FedTAN',
    100.0,
)
WEIGHT_BOUND = _secure_option(
    'secure_weight_bound',
    "Largest weight of a client in the server's mean, such as its number of"
    ' examples',
    default_text='the largest weight among the clients',
)
COUNT_BOUND = _secure_option(
    'secure_count_bound',
    'Largest number of values of a channel that the BN statistics of a client'
    ' describe',
    default_text=(
        'as many as a batch normalization layer of the model has for'
        " the largest client's examples"
    ),
)
OPTIONS = declared(vars())
