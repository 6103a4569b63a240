"""FedAP: models averaged by the similarity of the clients' statistics.

Lu, Wang, Chen, Qin, Xu, Dimitriadis, Qin, Personalized Federated Learning with
Adaptive Batchnorm for Healthcare, IEEE Transactions on Big Data 2022,
arXiv:2112.00734. Of the paper, only the abstract was available to us. The
equations are from the authors' code, github.com/microsoft/PersonalizedFL.
"""

import collections
from collections.abc import Mapping, Sequence
import functools
from typing import Any, Optional

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.aggregators import gathering
from tff_bn.aggregators import model_update
from tff_bn.aggregators import vector_layout
from tff_bn.catalog import algorithms
from tff_bn.clients import client_work
from tff_bn.clients.drift_correction import BoundCorrection
from tff_bn.clients.local_step import LocalResult
from tff_bn.clients.local_training_config import LocalTrainingConfig
from tff_bn.clients.personal_model import PersonalModelWork
from tff_bn.common import client_batches
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import FEDBN
from tff_bn.keras_model.shared_weights import SharedWeights
from tff_bn.processes import averaging
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import StatefulLearningProcess

__all__ = ['build_fed_ap']

# The part of an update that says how similar a client is to others.
_PART = 'similarity'
# The entries of a client's state.
_NUMBER = 'client_number'
_STATISTICS = 'compared_statistics'
_IS_COMPARED = 'is_compared'
# Numbers of clients are sent as float32.
_MAX_CLIENTS = 2**24
# Stands for the distance 0 of equal statistics, as in the authors' code.
_MIN_DISTANCE = 1e-14


def build_fed_ap(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    fedap_own_share: float = 0.5,
    fedap_fedbn_rounds: int = 5,
    **options: Unpack[Options],
) -> StatefulLearningProcess:
  """Builds FedAP, in which each client has its own average of all models.

  As in FedBN, batch normalization stays with the client. All other variables
  are a personal model: after a round, client i gets

      λ w_i + (1 - λ) Σ_j w_j / d_ij / Σ_j 1 / d_ij   with j ≠ i

  of the models w_j of the other clients that took part. The distance d_ij is
  the sum over the layers with statistics of the Wasserstein distance of normal
  distributions with independent channels,

      √(Σ (mean_i - mean_j)² + Σ (deviation_i - deviation_j)²).

  Training starts with `fedap_fedbn_rounds` rounds of FedBN, in which all
  clients get the mean of the models. The distances compare the clients' running
  statistics after these rounds, which are kept for all later rounds. A client
  that comes later is compared by its statistics after its first round. The
  authors' code has no such rounds: it compares statistics of a model that was
  trained on other data before.

  The server's model, with which a new client starts, is the mean of the
  clients' models before they are averaged for the clients.

  Args:
    model: The model, with batch normalization.
    client_optimizer: The optimizer of local training. Its state starts afresh
      in each round.
    fedap_own_share: λ, from 0 to 1. With 1, a client keeps its own model.
    fedap_fedbn_rounds: The number of rounds of FedBN at the start, at least 1.
    **options: See `tff_bn.algorithms.Options`. `server_optimizer`,
      `server_clip_norm`, `model_aggregator`, `statistics_aggregator`,
      `sum_aggregator`, `client_filter` and `drift_correction` must not be
      given: they act on one model of all clients. `client_weighting` has no
      effect.

  Returns:
    A process whose client state holds the client's model. The server must know
    which client sent which model, so each client needs its number: see
    `tff_bn.StatefulLearningProcess.personalize`. A client that is dropped or
    has no data keeps its model.

  Raises:
    TypeError: If the optimizer has the wrong type.
    ValueError: If an option is given that must not be, or has a value that is
      not allowed, or the model has no trained batch normalization.
  """
  algorithms.FEDAP_OWN_SHARE.check(fedap_own_share)
  algorithms.FEDAP_FEDBN_ROUNDS.check(fedap_fedbn_rounds)
  averaging.check_left_out(
      'fedap, whose clients have no model in common',
      options,
      (*averaging.SERVER_OPTIONS, 'server_clip_norm'),
  )
  return averaging.build_partitioned(
      model,
      FEDBN,
      client_optimizer,
      build_work=functools.partial(
          _FedAP,
          own_share=fedap_own_share,
          num_fedbn_rounds=fedap_fedbn_rounds,
      ),
      **options,
  )


class _FedAP(PersonalModelWork):
  """Training of a client's own model, and the averages of the models."""

  has_client_number = True

  def __init__(
      self,
      model: BatchNormModel,
      config: LocalTrainingConfig,
      weights: SharedWeights,
      correction: Optional[BoundCorrection],
      *,
      own_share: float,
      num_fedbn_rounds: int,
  ):
    super().__init__(model, config, weights, correction)
    self._own_share = own_share
    self._num_fedbn_rounds = num_fedbn_rounds
    self._statistics = weights.local_statistics
    self._dtype = model.variables[self._statistics[0][0]].dtype
    # The number of the layer of each entry of a vector of statistics.
    self._layers: np.ndarray = np.repeat(
        np.arange(len(self._statistics)),
        [2 * model.variables[mean].shape[0] for mean, _ in self._statistics],
    )

  def initial_client_state(
      self, values: Sequence[Any]
  ) -> collections.OrderedDict[str, Any]:
    """Returns the state of a client that has no number yet."""
    return collections.OrderedDict(
        super().initial_client_state(values),
        **{
            _NUMBER: tf.constant(-1),
            _STATISTICS: tf.zeros([len(self._layers)], self._dtype),
            _IS_COMPARED: tf.constant(False),
        },
    )

  def numbered(
      self, client_state: Mapping[str, Any], client_number: int
  ) -> collections.OrderedDict[str, Any]:
    """See the base class."""
    if not 0 <= client_number < _MAX_CLIENTS:
      raise ValueError(
          f'client_number must be from 0 to {_MAX_CLIENTS - 1} in fedap, but is'
          f' {client_number}.'
      )
    return collections.OrderedDict(
        client_state, **{_NUMBER: tf.constant(client_number).numpy()}
    )

  def _train(
      self,
      start: client_work.RoundStart,
      dataset: client_batches.Data,
      num_steps: Any,
  ) -> LocalResult:
    """Trains the client's own model."""
    personal = list(self.client_model(start.values, start.client_state))
    return super()._train(start._replace(values=personal), dataset, num_steps)

  def _report(
      self,
      start: client_work.RoundStart,
      dataset: client_batches.Data,
      result: LocalResult,
  ) -> collections.OrderedDict[str, Any]:
    """Adds the number and the statistics to the difference from the server."""
    report = super()._report(start, dataset, result)
    old, new = start.client_state, report['client_state']
    takes_part = report['update_weight'] > 0
    for name, value in self._personal(report['values']).items():
      new[name] = tf.where(takes_part, value, old[name])
    is_measured = takes_part & (
        (start.work_state['round_num'] < self._num_fedbn_rounds)
        | ~old[_IS_COMPARED]
    )
    new[_NUMBER] = old[_NUMBER]
    new[_STATISTICS] = tf.where(
        is_measured,
        self._vector_of_statistics(report['values']),
        old[_STATISTICS],
    )
    new[_IS_COMPARED] = old[_IS_COMPARED] | is_measured
    report['update'][_PART] = collections.OrderedDict(
        number=tf.cast(new[_NUMBER], tf.float32), statistics=new[_STATISTICS]
    )
    return report

  def _vector_of_statistics(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the means and standard deviations of each layer."""
    parts = []
    for mean, variance in self._statistics:
      parts += [values[mean], tf.sqrt(values[variance])]
    return tf.concat(parts, axis=0)

  def update_aggregator(
      self, update_type: tff.StructType, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """See the base class."""
    return _Averages(
        self._layers, self._own_share, self._num_fedbn_rounds
    ).create(update_type, weight_type)

  def finish_clients(
      self,
      client_states: tff.Value,
      sent: tff.Value,
      aggregated: tff.Value,
  ) -> tff.Value:
    """Gives each client its own average."""
    averages = aggregated[_PART]
    layout = _layout(aggregated.type_signature.member)
    averages_type = averages.type_signature.member

    @tff.tensorflow.computation(client_states.type_signature.member)
    def key_of(client_state):
      return tf.reshape(client_state[_NUMBER], [1])

    # In alphabetical order, because TFF's runtime sorts the names.
    @tff.tensorflow.computation(averages_type, np.int32)
    def average_of(averages, number):
      is_own = tf.equal(averages['numbers'], number)
      return collections.OrderedDict(
          difference=tf.reduce_sum(
              tf.boolean_mask(averages['differences'], is_own), axis=0
          ),
          found=tf.reduce_any(is_own),
      )

    selected = tff.federated_select(
        tff.federated_map(key_of, client_states),
        tff.federated_value(_MAX_CLIENTS, tff.SERVER),
        averages,
        average_of,
    )

    @tff.tensorflow.computation(
        client_states.type_signature.member,
        sent.type_signature.member,
        selected.type_signature.member,
    )
    def assign(client_state, shared, selected):
      average = selected.reduce(
          collections.OrderedDict(
              difference=tf.zeros([layout.size], layout.dtype),
              found=tf.constant(False),
          ),
          lambda _, element: element,
      )
      update = layout.from_vector(average['difference'])
      values = self._weights.merge(
          self._weights.moved(shared, update), client_state
      )
      new = collections.OrderedDict(client_state)
      for name, value in self._personal(values).items():
        new[name] = tf.where(average['found'], value, client_state[name])
      return new

    return tff.federated_map(assign, (client_states, sent, selected))


def _layout(update_type: tff.StructType) -> vector_layout.VectorLayout:
  """Returns the layout of the shared variables in an update."""
  return vector_layout.VectorLayout(
      'fedap',
      tff.StructWithPythonType(
          [
              (name, part)
              for name, part in tff.structure.iter_elements(update_type)
              if name in SharedWeights.PARTS
          ],
          collections.OrderedDict,
      ),
  )


class _Averages(tff.aggregators.WeightedAggregationFactory):
  """Averages the clients' models for the server and for each client.

  The result has the server's average, and `similarity` with the numbers of the
  clients that took part and the average for each of them: the difference
  between the server's model and the client's new one, as a vector.
  """

  def __init__(
      self, layers: np.ndarray, own_share: float, num_fedbn_rounds: int
  ):
    self._layers = layers
    self._own_share = own_share
    self._num_fedbn_rounds = num_fedbn_rounds

  def create(
      self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Returns the process, whose state is the number of finished rounds."""
    layout = _layout(value_type)
    num_statistics = len(self._layers)

    @tff.tensorflow.computation(value_type)
    def to_row(update):
      similarity = update[_PART]
      parts = collections.OrderedDict(
          (name, part) for name, part in update.items() if name != _PART
      )
      return tf.concat(
          [
              tf.cast(similarity['number'][tf.newaxis], layout.dtype),
              tf.cast(similarity['statistics'], layout.dtype),
              layout.to_vector(parts),
          ],
          axis=0,
      )

    @tff.tensorflow.computation(weight_type)
    def takes_part(weight):
      return weight > 0

    count = model_update.count_of(weight_type)
    gathered_type = gathering.gathered_type(to_row.type_signature.result)

    @tff.tensorflow.computation(
        gathered_type, count.type_signature.result, np.int32
    )
    def average(gathered, counts, num_rounds):
      numbers, statistics, differences = tf.split(
          gathered['values'], [1, num_statistics, layout.size], axis=1
      )
      numbers = tf.cast(numbers[:, 0], tf.int32)
      num_clients = tf.size(numbers)
      with tf.control_dependencies([_check_numbers(numbers)]):
        shares = tf.cond(
            num_rounds < self._num_fedbn_rounds,
            lambda: tf.fill(
                [num_clients, num_clients],
                tf.cast(1 / num_clients, layout.dtype),
            ),
            lambda: tf.cast(
                similar_shares(statistics, self._layers, self._own_share),
                layout.dtype,
            ),
        )
      mean = tf.math.divide_no_nan(
          tf.reduce_sum(differences, axis=0),
          tf.cast(num_clients, layout.dtype),
      )
      result = collections.OrderedDict(layout.from_vector(mean))
      result[_PART] = collections.OrderedDict(
          numbers=numbers, differences=shares @ differences
      )
      result['num_participants'] = num_clients
      result['num_dropped'] = counts['num_dropped'] + gathered['num_dropped']
      return result, num_rounds + 1

    @tff.federated_computation
    def initialize():
      return tff.federated_value(0, tff.SERVER)

    @tff.federated_computation(
        tff.FederatedType(np.int32, tff.SERVER),
        tff.FederatedType(value_type, tff.CLIENTS),
        tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state, update, weight):
      gathered = gathering.gather(
          tff.federated_map(to_row, update),
          tff.federated_map(takes_part, weight),
      )
      counts = tff.federated_sum(tff.federated_map(count, weight))
      result, num_rounds = tff.federated_map(average, (gathered, counts, state))
      return tff.templates.MeasuredProcessOutput(
          num_rounds, result, tff.federated_value((), tff.SERVER)
      )

    return tff.templates.AggregationProcess(initialize, next_fn)


def _check_numbers(numbers: tf.Tensor) -> tf.Operation:
  """Fails if clients have the same number, or none."""
  num_different = tf.shape(tf.unique(numbers)[0])[0]
  return tf.debugging.Assert(
      tf.reduce_all(numbers >= 0) & tf.equal(num_different, tf.size(numbers)),
      [
          'fedap needs a number of its own for each client, from'
          ' process.personalize(client_state, client_number), but the numbers'
          ' are',
          numbers,
      ],
      summarize=10,
  )


def similar_shares(
    statistics: tf.Tensor, layers: np.ndarray, own_share: float
) -> tf.Tensor:
  """Computes the share of each client's model in the average of each client.

  Args:
    statistics: The clients' statistics, floats of shape `[n, d]`: means and
      standard deviations.
    layers: The number of the layer of each of the d entries, in ascending
      order.
    own_share: λ, the share of a client's own model. A client that is alone has
      its own.

  Returns:
    float64 of shape `[n, n]`. Each row has the sum 1.
  """
  statistics = tf.cast(statistics, tf.float64)

  def distances(row):
    squares = tf.transpose(tf.square(statistics - row))
    return tf.reduce_sum(tf.sqrt(tf.math.segment_sum(squares, layers)), axis=0)

  num_clients = tf.shape(statistics)[0]
  # A row at a time, because all differences would not fit into memory.
  nearness = 1 / tf.maximum(
      tf.map_fn(distances, statistics), tf.constant(_MIN_DISTANCE, tf.float64)
  )
  others = tf.linalg.set_diag(nearness, tf.zeros([num_clients], tf.float64))
  others = tf.math.divide_no_nan(
      others, tf.reduce_sum(others, axis=1, keepdims=True)
  )
  own = tf.where(num_clients > 1, tf.constant(own_share, tf.float64), 1.0)
  return own * tf.eye(num_clients, dtype=tf.float64) + (1 - own) * others
