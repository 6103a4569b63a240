"""BNGuard: leaves out clients whose batch normalization statistics stand out.

Xu, Zhang, Hu, On the Out-of-Distribution Backdoor Attack for Federated
Learning, MobiHoc 2025, arXiv:2509.13219. Of the paper, only the abstract was
available to us. The features and the clustering are those of the authors'
public code, github.com/JiiahaoXU/SoDa-BNGuard (`agg_bnguard`).

Attackers can train on data of another distribution and keep the change of their
weights near to an honest one. A rule for the changes of the weights then finds
nothing. But the running statistics follow the data.
"""

import collections
from collections.abc import Mapping
from typing import Any, Optional

import tensorflow as tf
import tensorflow_federated as tff

from tff_bn.aggregators import gathering
from tff_bn.aggregators import moments_factories
from tff_bn.aggregators import robust_rule
from tff_bn.aggregators import stateless
from tff_bn.aggregators import vector_layout
from tff_bn.aggregators import weighted_mean
from tff_bn.common import checks

_STATISTICS = 'statistics'
# The features are sums of up to fourth powers, which must be finite in float64.
_LARGEST = 1e38
# As in scikit-learn, which the authors use. Few are needed.
_MAX_ITERATIONS = 300


class BnGuardFactory(tff.aggregators.WeightedAggregationFactory):
  """Clusters the clients by their statistics and averages the larger cluster.

  1.  A client's features are four numbers of the first batch normalization
      layer: over its channels, the mean and the variance (divided by the number
      of channels minus 1) of the running means, and the same of the running
      variances.
  2.  The clients are divided into two clusters by k-means with k = 2. The
      authors start from random centers. Here, each client and the client
      furthest from it are tried as centers, and the clusters with the least sum
      of squared distances are taken, so the result depends on no seed.
  3.  The larger cluster is averaged as without a defense: updates by the
      clients' weights, statistics by their counts. If both clusters have the
      same size, there is no majority, and all clients are averaged.

  There are always two clusters, so without any attacker honest clients are left
  out, too: those in the smaller cluster.
  """

  def __init__(
      self,
      statistics_aggregator: Optional[moments_factories.MomentsFactory] = None,
  ):
    """Initializes the factory.

    Args:
      statistics_aggregator: How the statistics of the larger cluster are
        combined. Default: the means of means and variances.

    Raises:
      TypeError: If it is no `MomentsFactory`.
      ValueError: If it has a rule.
    """
    if statistics_aggregator is None:
      statistics_aggregator = moments_factories.NaiveMomentsFactory()
    checks.check_type(
        'statistics_aggregator of BnGuardFactory',
        statistics_aggregator,
        moments_factories.MomentsFactory,
        'be a factory of moments, such as'
        ' tff_bn.aggregators.PooledMomentsFactory()',
    )
    if statistics_aggregator.rule is not None:
      raise ValueError(
          'statistics_aggregator of BnGuardFactory has the rule'
          f' {type(statistics_aggregator.rule).__name__}, but the clients that'
          ' are left are averaged; leave the rule out.'
      )
    self._statistics_aggregator = statistics_aggregator

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Creates the aggregation process.

    Args:
      value_type: The type of a client's update, see
        `tff_bn.aggregators.model_update`: floats of static shapes.
      weight_type: The type of a client's weight: a float scalar, 0 if the
        client abstains, NaN if it was dropped.

    Returns:
      A weighted process without a state. Its result has the parts of the
      update; `num_participants`, the number of clients that were averaged; and
      `num_dropped`, the number of clients whose weight or update was not
      finite. The measurement is `num_filtered_clients`, the size of the smaller
      cluster.

    Raises:
      TypeError: If a value is no float.
      ValueError: If the update has no statistics.
    """
    parts = dict(tff.structure.iter_elements(value_type))
    if not parts.get(_STATISTICS):
      raise ValueError(
          'client_filter=bnguard compares the batch normalization statistics of'
          ' the clients, but they send none.'
      )
    average = _Average(value_type, weight_type, self._statistics_aggregator)

    @tff.tensorflow.computation(value_type, weight_type)
    def to_vector(value, weight):
      return average.to_vector(value, weight)

    @tff.tensorflow.computation(
        gathering.gathered_type(to_vector.type_signature.result[0])
    )
    def aggregate(gathered):
      return average.aggregate(gathered)

    def next_fn(state, value, weight):
      vectors = tff.federated_map(to_vector, (value, weight))
      output = tff.federated_map(
          aggregate, gathering.gather(vectors[0], vectors[1])
      )
      return tff.templates.MeasuredProcessOutput(state, output[0], output[1])

    return stateless.build(next_fn, value_type, weight_type)


class _Average:
  """The TensorFlow part of the process."""

  def __init__(
      self,
      value_type: tff.Type,
      weight_type: tff.Type,
      statistics_aggregator: moments_factories.MomentsFactory,
  ):
    self._types = collections.OrderedDict(
        tff.structure.iter_elements(value_type)
    )
    moments_type = moments_factories.to_moments_type(self._types[_STATISTICS])
    self._types[_STATISTICS] = moments_type
    self._moments = statistics_aggregator.mean(moments_type)
    self._layout = vector_layout.VectorLayout(
        'client_filter=bnguard',
        collections.OrderedDict(weight=weight_type, update=self._types),
    )

  def to_vector(
      self, value: Mapping[str, Any], weight: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a client's vector, and whether the client takes part."""
    member = collections.OrderedDict(weight=weight, update=value)
    return self._layout.to_vector(member), robust_rule.takes_part(weight)

  def aggregate(
      self, gathered: Mapping[str, tf.Tensor]
  ) -> tuple[
      collections.OrderedDict[str, Any], collections.OrderedDict[str, tf.Tensor]
  ]:
    """Returns the result and the measurements, from `gathering.gather`."""
    rows = gathered['values']
    is_kept = larger_cluster(
        features(
            *(
                rows[:, self._layout.columns(f'update/{_STATISTICS}/0/{name}')]
                for name in ('mean', 'variance')
            )
        )
    )
    num_kept = tf.reduce_sum(tf.cast(is_kept, tf.int32))
    result = self._mean(tf.boolean_mask(rows, is_kept))
    result['num_participants'] = num_kept
    result['num_dropped'] = gathered['num_dropped']
    return result, collections.OrderedDict(
        num_filtered_clients=tf.shape(rows)[0] - num_kept
    )

  def _mean(self, rows: tf.Tensor) -> collections.OrderedDict[str, Any]:
    """Averages clients, one in a row."""
    others = collections.OrderedDict(
        (name, part)
        for name, part in self._types.items()
        if name != _STATISTICS
    )

    def add(totals, row):
      member = self._layout.from_vector(row)
      update = member['update']
      values = collections.OrderedDict((name, update[name]) for name in others)
      return (
          weighted_mean.add(totals[0], values, member['weight']),
          self._moments.add(totals[1], update[_STATISTICS]),
      )

    means, moments = tf.foldl(
        add,
        rows,
        (
            weighted_mean.of_nobody(tff.to_type(others)),
            self._moments.of_nobody(),
        ),
    )
    parts = dict(means['mean'], statistics=self._moments.report(moments))
    return collections.OrderedDict((name, parts[name]) for name in self._types)


def features(means: tf.Tensor, variances: tf.Tensor) -> tf.Tensor:
  """Describes the statistics of a layer by four numbers for each client.

  Args:
    means: The running means, one client in a row: finite, `[n, channels]`.
    variances: The running variances, in the same form.

  Returns:
    Mean and variance of the means, then of the variances; float64 `[n, 4]`.
  """
  columns = []
  for values in (means, variances):
    values = tf.clip_by_value(tf.cast(values, tf.float64), -_LARGEST, _LARGEST)
    mean = tf.reduce_mean(values, axis=1, keepdims=True)
    columns.append(tf.squeeze(mean, axis=1))
    deviations = tf.reduce_sum(tf.math.square(values - mean), axis=1)
    columns.append(deviations / max(values.shape[1] - 1, 1))
  return tf.stack(columns, axis=1)


def larger_cluster(points: tf.Tensor) -> tf.Tensor:
  """Divides points into two clusters and selects the larger one.

  See `BnGuardFactory`.

  Args:
    points: One point in a row: finite float64 of shape `[n, d]`.

  Returns:
    Whether each point is in the larger cluster, bool of shape `[n]`; true for
    all points if both clusters have the same size or all points are equal.
  """
  num_points = tf.shape(points)[0]
  return tf.cond(
      num_points > 1,
      lambda: _larger_cluster(points),
      lambda: tf.ones([num_points], tf.bool),
  )


def _larger_cluster(points: tf.Tensor) -> tf.Tensor:
  def squared_distances(centers):
    differences = points[tf.newaxis] - centers[:, tf.newaxis]
    return tf.reduce_sum(tf.math.square(differences), axis=2)

  def means(members):
    members = tf.cast(members, points.dtype)
    return tf.math.divide_no_nan(
        tf.linalg.matmul(members, points),
        tf.reduce_sum(members, axis=1, keepdims=True),
    )

  def assign(first, second):
    to_first, to_second = squared_distances(first), squared_distances(second)
    return to_second < to_first, tf.reduce_sum(
        tf.minimum(to_first, to_second), axis=1
    )

  def step(is_second, squares, has_changed):
    del squares, has_changed
    moved, squares = assign(means(tf.logical_not(is_second)), means(is_second))
    return moved, squares, tf.reduce_any(tf.not_equal(moved, is_second))

  # One row for each start.
  furthest = tf.math.argmax(squared_distances(points), axis=1)
  is_second, squares, _ = tf.while_loop(
      lambda is_second, squares, has_changed: has_changed,
      step,
      (*assign(points, tf.gather(points, furthest)), tf.constant(True)),
      maximum_iterations=_MAX_ITERATIONS,
  )
  is_second = is_second[tf.math.argmin(squares)]
  num_second = tf.reduce_sum(tf.cast(is_second, tf.int32))
  num_first = tf.size(is_second) - num_second
  is_wanted = tf.equal(is_second, num_second > num_first)
  return tf.logical_or(is_wanted, tf.equal(num_first, num_second))
