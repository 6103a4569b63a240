"""The traffic of algorithms against the FedTAN paper and by hand."""

import collections
import types

import keras
import numpy as np
import pytest
import small_models
import tensorflow as tf
import tensorflow_federated as tff

from tff_bn import algorithms
from tff_bn import analysis
from tff_bn import models
from tff_bn import runtime
from tff_bn.keras_model.partition import Role
from tff_bn.processes import phased_process
from tff_bn.runtime import plan as plan_lib

_UP = analysis.Direction.UP


def _sgd():
  return tff.learning.optimizers.build_sgdm(0.1)


@pytest.mark.slow
def test_numbers_of_the_paper(in_process_runtime):
  """FedTAN, section 5.3: ResNet-20 with 5 clients, floats of 4 bytes."""
  model = small_models.classifier(
      models.build_model_fn('resnet20', (32, 32, 3), 10), (32, 32, 3)
  )
  fed_avg = algorithms.build_fed_avg(model, _sgd())
  fedtan = algorithms.build_fedtan(model, _sgd())

  traffic = analysis.computation_traffic(fed_avg.next)
  # Its parameters and statistics with batch and with group normalization.
  assert traffic == analysis.Traffic(1, 4 * 271_098, 4 * 271_098)
  assert f'{traffic.megabytes(5):.4f}' == '6.2049'
  without_bn = analysis.Traffic(1, 4 * 269_722, 4 * 269_722)
  assert f'{without_bn.megabytes(5):.4f}' == '6.1734'
  one = analysis.ProcessTraffic(fedtan).until(1, 5)

  assert one['exchanges'] == 3 * 19 + 1
  assert f'{one["megabytes"]:.4f}' == '6.2679'
  assert f'{100 * (1 - 1 / one["exchanges"]):.2f}' == '98.28'
  # FedTAN-II: the additional share of the traffic of 10,000 rounds. The paper
  # computes it from rounded megabytes.
  base = analysis.ProcessTraffic(fed_avg).until(1, 5)
  rounded = round(base['megabytes'], 4)
  for sync_rounds, exchanges, megabytes in (
      (1000, '85.07', '0.1014'),
      (2000, '91.94', '0.2027'),
      (4000, '95.80', '0.4045'),
  ):
    computation = phased_process.PhasedComputation(
        [
            phased_process.Phase(sync_rounds, fedtan.next),
            phased_process.Phase(None, fed_avg.next),
        ]
    )
    costs = analysis.ProcessTraffic(
        types.SimpleNamespace(next=computation)
    ).until(10_000, 5)
    assert f'{100 * (1 - 10_000 / costs["exchanges"]):.2f}' == exchanges
    extra = costs['megabytes'] - 10_000 * base['megabytes']
    assert extra == pytest.approx(
        sync_rounds * (one['megabytes'] - base['megabytes'])
    )
    extra = sync_rounds * (round(one['megabytes'], 4) - rounded)
    assert f'{100 * extra / (10_000 * rounded + extra):.4f}' == megabytes
  # Only statistics and parameters leave the clients: no activations, whose
  # first size is unknown, and no labels.
  expected = collections.Counter(v.shape for v in model.variables)
  for variable in model.variables:
    if variable.role is Role.MOVING_MEAN:
      expected[variable.shape] += 4  # Mean, variance and their gradients.
  uploads = [m for m in analysis.messages(fedtan.next) if m.direction is _UP]
  sizes = collections.Counter(m.shape for m in uploads if not m.is_scalar)
  assert sizes == expected


def test_table_5():
  """500 rounds of a perceptron on MNIST (appendix H).

  The paper's gigabytes are gigabits. They belong to 23,920 values: the trained
  values of 784-30-10 with a bias before batch normalization, without running
  statistics. Our `mlp3` has statistics, but not this redundant bias. The last
  row's gigabits are without the exchanges of the layers, unlike its percentage.
  """
  model = small_models.classifier(
      models.build_model_fn('mlp3', (28, 28, 1), 10), (28, 28, 1)
  )
  fed_avg, fedtan = (
      analysis.computation_traffic(build(model, _sgd()).next)
      for build in (algorithms.build_fed_avg, algorithms.build_fedtan)
  )
  assert fed_avg.download_bytes == 4 * 23_950
  extra_exchanges = fedtan.exchanges - fed_avg.exchanges
  extra = fedtan.megabytes(5) - fed_avg.megabytes(5)
  num_values = 784 * 30 + 30 + 2 * 30 + 30 * 10 + 10
  assert num_values == 23_920
  base = 500 * analysis.Traffic(1, 4 * num_values, 4 * num_values).megabytes(5)
  for sync_rounds, gigabits, rounds, bits in (
      (10, '2.1388', '5.66', '0.0100'),
      (50, '2.1397', '23.08', '0.0501'),
      (100, '2.1408', '37.50', '0.1002'),
      (500, None, '75.00', '0.4992'),
  ):
    total = base + sync_rounds * extra
    if gigabits is not None:
      assert f'{8 * total / 1024:.4f}' == gigabits
    exchanges = sync_rounds * extra_exchanges
    assert f'{100 * exchanges / (500 + exchanges):.2f}' == rounds
    assert f'{100 * sync_rounds * extra / total:.4f}' == bits
  assert f'{8 * base / 1024:.4f}' == '2.1386'


class _AUC(keras.metrics.AUC):
  """An AUC of binary logits; its state of four vectors is only for metrics."""

  def update_state(self, y_true, y_pred, sample_weight=None):
    super().update_state(y_true, tf.sigmoid(y_pred[:, 1]), sample_weight)


@pytest.fixture(scope='module')
def model():
  return small_models.classifier(
      lambda: keras.Sequential(
          [
              keras.layers.Input([3]),
              keras.layers.Dense(5),
              keras.layers.BatchNormalization(),
              keras.layers.Dense(2, dtype=tf.float64),
          ]
      ),
      (3,),
      metrics_fn=lambda: [_AUC(name='auc')],
  )


_KERNELS = 4 * (3 * 5 + 5) + 8 * (5 * 2 + 2)
_AFFINE = 4 * 2 * 5
_STATISTICS = 4 * 2 * 5


@pytest.fixture(scope='module')
def fed_avg(model):
  return algorithms.build_fed_avg(model, _sgd())


def test_all_variables_go_both_ways(fed_avg):
  traffic = analysis.computation_traffic(fed_avg.next)

  num_bytes = _KERNELS + _AFFINE + _STATISTICS
  assert traffic == analysis.Traffic(1, num_bytes, num_bytes)


def test_one_multicast_down_and_every_upload():
  assert analysis.Traffic(3, 2**20, 2**19).megabytes(4) == 1.0 + 4 * 0.5


@pytest.mark.parametrize(
    ('build', 'num_exchanges', 'num_bytes'),
    [
        (algorithms.build_fed_bn, 1, _KERNELS),
        (algorithms.build_local_affine, 1, _KERNELS + _STATISTICS),
        (algorithms.build_single, 0, 0),
    ],
)
def test_local_variables_are_not_sent(model, build, num_exchanges, num_bytes):
  traffic = analysis.computation_traffic(build(model, _sgd()).next)

  assert traffic == analysis.Traffic(num_exchanges, num_bytes, num_bytes)


class _CastFactory(tff.aggregators.UnweightedAggregationFactory):
  """Sums the clients' values, which they send in another dtype."""

  def __init__(self, dtype):
    self._dtype = dtype

  def create(self, value_type):
    @tff.tensorflow.computation(value_type)
    def encode(value):
      return tf.nest.map_structure(lambda v: tf.cast(v, self._dtype), value)

    @tff.tensorflow.computation(encode.type_signature.result)
    def decode(value):
      return [
          tf.cast(v, v_type.dtype.type) for v, v_type in zip(value, value_type)
      ]

    @tff.federated_computation
    def initialize():
      return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
        initialize.type_signature.result,
        tff.FederatedType(value_type, tff.CLIENTS),
    )
    def next_fn(state, value):
      total = tff.federated_sum(tff.federated_map(encode, value))
      return tff.templates.MeasuredProcessOutput(
          state,
          tff.federated_map(decode, total),
          tff.federated_value((), tff.SERVER),
      )

    return tff.templates.AggregationProcess(initialize, next_fn)


def _fed_avg_with_casts(model, dtype):
  return algorithms.build_fed_avg(
      model,
      _sgd(),
      model_aggregator=_CastFactory(dtype),
      client_weighting='uniform',
  )


def test_neither_data_nor_labels_leave_the_clients(fed_avg):
  messages = analysis.messages(fed_avg.next)

  uploads = [m for m in messages if m.direction is _UP]
  for message in uploads:
    assert message.shape is not None and None not in message.shape
    assert message.dtype.is_floating or message.is_scalar
  # The AUC has four counts at each of 200 thresholds.
  for_metrics = [m.shape for m in uploads if m.metrics_only]
  assert for_metrics.count((200,)) == 4
  # Tensors for the state.
  assert collections.Counter(
      m.shape for m in uploads if not m.metrics_only and not m.is_scalar
  ) == collections.Counter([(3, 5), (5,), (5,), (5,), (5,), (5,), (5, 2), (2,)])


@pytest.fixture(scope='module')
def phased(model):
  return phased_process.build_phased_process(
      [
          (3, _fed_avg_with_casts(model, tf.float16)),
          (2, _fed_avg_with_casts(model, tf.float64)),
          (None, _fed_avg_with_casts(model, tf.bfloat16)),
      ]
  )


def test_aggregator_that_compresses(phased):
  traffic = analysis.computation_traffic(phased.next.phases[0].computation)

  num_trainable = (3 * 5 + 5) + 2 * 5 + (5 * 2 + 2)
  assert traffic == analysis.Traffic(
      exchanges=1,
      download_bytes=_KERNELS + _AFFINE + _STATISTICS,
      upload_bytes=2 * num_trainable + _STATISTICS,
  )


def test_only_computations_can_be_counted(phased):
  with pytest.raises(ValueError, match='PhasedComputation .* ProcessTraffic'):
    analysis.computation_traffic(phased.next)


def test_traffic_of_phases(phased):
  traffic = analysis.ProcessTraffic(phased)

  rest = _KERNELS + _AFFINE + _STATISTICS + 4 * _STATISTICS
  megabytes = np.cumsum(
      [0]
      + [(rest + 4 * 42 * size) / 2**20 for size in (2, 2, 2, 8, 8, 2, 2, 2)]
  )
  # In any order, because a run can be continued.
  for round_num in (6, 0, 3, 4, 2, 8, 5):
    costs = traffic.until(round_num, num_clients=4)
    assert costs['exchanges'] == round_num
    assert costs['megabytes'] == pytest.approx(megabytes[round_num])


@pytest.mark.slow
def test_traffic_of_fedtan_every_third_round(model):
  def traffic(**options):
    return analysis.ProcessTraffic(
        algorithms.build_fedtan(model, _sgd(), local_steps=1, **options)
    )

  fed_avg = analysis.ProcessTraffic(
      algorithms.build_fed_avg(model, _sgd(), local_steps=1)
  )
  some, each = traffic(synchronize_every=3), traffic()
  for round_num, synchronized in ((0, 0), (1, 1), (3, 1), (4, 2), (8, 3)):
    found = some.until(round_num, num_clients=4)
    parts = (
        each.until(synchronized, num_clients=4),
        fed_avg.until(round_num - synchronized, num_clients=4),
    )
    for name, value in found.items():
      assert value == pytest.approx(sum(part[name] for part in parts))


def test_phases_are_counted_once_and_lazily(phased, monkeypatch):
  counted = []
  original = analysis.communication.computation_traffic

  def computation_traffic(computation):
    counted.append(computation)
    return original(computation)

  monkeypatch.setattr(
      analysis.communication, 'computation_traffic', computation_traffic
  )
  traffic = analysis.ProcessTraffic(phased)
  traffic.until(0, 2)
  assert not counted
  first, second, _ = (phase.computation for phase in phased.next.phases)
  for round_num in (3, 4, 5, 5, 1):
    traffic.until(round_num, 2)
  assert len(counted) == 2
  assert counted[0] is first and counted[1] is second


def test_plan_of_the_context_is_used(fed_avg, monkeypatch):
  made = []
  original = plan_lib.Plan

  def make_plan(*arguments):
    made.append(arguments)
    return original(*arguments)

  monkeypatch.setattr(plan_lib, 'Plan', make_plan)
  with runtime.in_process_runtime():
    for _ in range(2):
      analysis.computation_traffic(fed_avg.next)
  assert len(made) == 1


def _lora():
  """A frozen embedding, attention-like and dense layers with LoRA, and BN."""
  layers = keras.layers
  embedding = layers.Embedding(50, 16)
  mixing = layers.EinsumDense('abc,cd->abd', (None, 32))
  dense = layers.Dense(64)
  model = keras.Sequential(
      [
          *(keras.Input((6,), dtype='int32'), embedding, mixing),
          *(layers.GlobalAveragePooling1D(), dense),
          *(layers.BatchNormalization(), layers.Dense(3)),
      ]
  )
  for layer in (embedding, mixing, dense):
    layer.enable_lora(1)
    if getattr(layer, 'bias', None) is not None:
      layer.bias.trainable = False
  return model


def test_lora_sends_what_training_changes():
  model = small_models.classifier(
      _lora,
      (tf.TensorSpec([None, 6], tf.int32), tf.TensorSpec([None], tf.int32)),
  )
  # By hand: r (a + b) for each kernel of shape [a, b], batch normalization
  # without its statistics, and the last layer.
  lora = (50 + 16) + (16 + 32) + (32 + 64)
  num_values = lora + 64 * 2 + 64 * 3 + 3
  process = algorithms.build_silo_bn(model, _sgd())

  traffic = analysis.computation_traffic(process.next)

  assert traffic == analysis.Traffic(1, 4 * num_values, 4 * num_values)


def test_slices_of_a_value_count_without_the_rest(in_process_runtime):
  table_type = tff.TensorType(np.float32, [None, 5])

  @tff.tensorflow.computation(table_type, np.int32)
  def look_up(table, key):
    return collections.OrderedDict(row=table[key], found=key > 0)

  @tff.tensorflow.computation(
      tff.SequenceType(look_up.type_signature.result), np.float32
  )
  def total(rows, number):
    return number + rows.reduce(
        0.0, lambda sum_, row: sum_ + tf.reduce_sum(row['row'])
    )

  @tff.federated_computation(
      tff.FederatedType(table_type, tff.SERVER),
      tff.FederatedType(tff.TensorType(np.int32, [2]), tff.CLIENTS),
      tff.FederatedType(np.float32, tff.CLIENTS),
  )
  def comp(table, keys, numbers):
    rows = tff.federated_select(
        keys, tff.federated_value(3, tff.SERVER), table, look_up
    )
    return tff.federated_sum(tff.federated_map(total, (rows, numbers)))

  slices = {m.name: (m.direction, m.shape) for m in analysis.messages(comp)}
  assert slices['row'] == (analysis.Direction.DOWN, (2, 5))
  assert slices['found'] == (analysis.Direction.DOWN, (2,))
  assert len(slices) == 3  # And the sum, which has no name.
  assert analysis.computation_traffic(comp).download_bytes == 2 * 5 * 4 + 2
