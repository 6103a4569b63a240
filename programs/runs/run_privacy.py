"""Secure sums and differential privacy in a run."""

from collections.abc import Iterator, Mapping
import functools
from typing import Any, Optional

from absl import logging

from tff_bn import data as tff_bn_data
from tff_bn.aggregators import dp_sums
from tff_bn.aggregators import secure_sums
from tff_bn.aggregators import summed_update
from tff_bn.analysis import privacy_accounting
from tff_bn.catalog import columns
from tff_bn.catalog import local_training
from tff_bn.catalog import privacy
from tff_bn.common import progress
from tff_bn.keras_model import batch_norm_positions
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.programs.flags import privacy_flags
from tff_bn.programs.plan import settings as settings_lib
from tff_bn.training import metrics_log


def build_sums(
    settings: settings_lib.RunSettings,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
) -> Optional[summed_update.RoundSums]:
  """Returns the factory of sums of a run; None without `--privacy`.

  Raises:
    ValueError: If a bound is needed that does not follow from the data and the
      model, or no noise is known for `--dp_epsilon`.
  """
  arguments = settings.arguments(privacy_flags.PrivacyFlags)
  match settings.privacy:
    case privacy.SECURE_SUM:
      return secure_sums.SecureSums(
          **{**_bounds(settings, model, data), **arguments}
      )
    case privacy.DP:
      for name in ('epsilon', 'delta', 'noise_multiplier'):
        arguments.pop(name, None)
      return dp_sums.DpSums(
          _noise_multiplier(settings, data),
          **arguments,
          num_clients=_sampling(settings, data).clients_per_round,
          seed=settings.seed,
      )
  return None


def round_columns(
    settings: settings_lib.RunSettings, data: tff_bn_data.FederatedData
) -> metrics_log.RoundColumns:
  """Returns the columns of `metrics.csv` that `--privacy` adds."""
  match settings.privacy:
    case privacy.SECURE_SUM:
      return {columns.CLIPPED_CLIENTS.name: _clipped_clients}
    case privacy.DP:
      noise_multiplier = _noise_multiplier(settings, data)
      epsilon = functools.partial(
          privacy_accounting.epsilon,
          noise_multiplier,
          _sampling(settings, data),
          delta=settings.dp_delta,
      )
      progress.say(
          'Differential privacy at client level: noise multiplier'
          f' {noise_multiplier:.4g}, ε = {epsilon(settings.rounds):.4g} with'
          f' δ = {settings.dp_delta:g} after {settings.rounds} rounds.'
      )
      return {columns.EPSILON.name: lambda number, _: epsilon(number)}
  return {}


def _sampling(
    settings: settings_lib.RunSettings, data: tff_bn_data.FederatedData
) -> privacy_accounting.Sampling:
  num_clients = len(data.client_ids)
  return privacy_accounting.Sampling(
      num_clients, settings.clients_per_round or num_clients
  )


def _noise_multiplier(
    settings: settings_lib.RunSettings, data: tff_bn_data.FederatedData
) -> float:
  if settings.dp_noise_multiplier is not None:
    return settings.dp_noise_multiplier
  return privacy_accounting.noise_multiplier(
      settings.dp_epsilon,
      _sampling(settings, data),
      settings.rounds,
      settings.dp_delta,
  )


def _bounds(
    settings: settings_lib.RunSettings,
    model: BatchNormModel,
    data: tff_bn_data.FederatedData,
) -> Mapping[str, float]:
  """Returns the bounds of secure sums that follow from data and model."""
  if settings.local_steps is not None:
    most_examples = settings.local_steps * settings.batch_size
  else:
    most_examples = settings.local_epochs * max(
        map(len, data.train_indices.values())
    )
  weight = {
      local_training.UNIFORM: 1,
      local_training.SAMPLE_WEIGHTS: settings.secure_weight_bound,
  }.get(settings.client_weighting, most_examples)
  if weight is None:
    raise ValueError(
        f'--client_weighting={settings.client_weighting} with'
        f' --privacy={settings.privacy} needs --secure_weight_bound, because'
        " the largest sum of a client's weights is not known."
    )
  positions = batch_norm_positions.most_values_per_example(model.keras_model)
  count = settings.secure_count_bound
  if positions is not None:
    count = max(weight, most_examples * positions)
  if count is None:
    raise ValueError(
        f'--privacy={settings.privacy} needs --secure_count_bound for'
        f' {settings.describe_model()}: the input of a batch normalization'
        ' layer has no fixed size.'
    )
  return {'weight_bound': float(weight), 'count_bound': float(count)}


def _clipped_clients(
    round_num: int, metrics: Mapping[str, Any]
) -> Optional[int]:
  """Counts clients with values out of the bounds of secure sums in a round."""
  if not round_num:
    return None
  number = sum(
      _clipped_counts([metrics.get('aggregator'), metrics.get('distributor')])
  )
  if number:
    logging.warning(
        'Round %d: values of clients were out of the bounds of secure sums and'
        ' were clipped, %d times. Larger --secure_…_bound help.',
        round_num,
        number,
    )
  return number


def _clipped_counts(measurements: Any) -> Iterator[int]:
  """Yields the numbers of clipped clients of all secure sums."""
  if isinstance(measurements, Mapping):
    for name, value in measurements.items():
      if name.endswith('_clipped_count'):
        yield int(value)
      else:
        yield from _clipped_counts(value)
  elif isinstance(measurements, (list, tuple)):
    for value in measurements:
      yield from _clipped_counts(value)
