"""Rounds of federated averaging to time: data, models and a process.

TensorFlow is imported late, see `harness`.
"""

from collections.abc import Sequence
from typing import Any

import harness

_LEARNING_RATES = {'small_cnn': 0.1, 'resnet20': 0.01}


class Row(harness.Row):
  """A kind of round, with the learning rate of its model."""

  models = tuple(_LEARNING_RATES)

  @property
  def learning_rate(self) -> float:
    """The clients' learning rate."""
    return _LEARNING_RATES[self.model]


class FedAvgRounds:
  """A row's data, model and process."""

  def __init__(self, row: Row):
    import tensorflow_federated as tff

    from tff_bn import algorithms
    from tff_bn import models

    self.row = row
    self.data = federated_data(row)
    self.model = harness.build_classifier(
        models.build_model_fn(
            row.model, self.data.dataset.input_shape, harness.NUM_CLASSES
        ),
        self.data.element_spec,
    )
    self.process = algorithms.build_fed_avg(
        self.model, tff.learning.optimizers.build_sgdm(row.learning_rate)
    )
    self.initial = self.model.from_model_weights(self.model.initial_weights)

  def _draw(self, round_num: int) -> dict[str, int]:
    return dict(
        seed=0,
        round_num=round_num,
        batch_size=self.row.batch_size,
        local_steps=self.row.num_steps,
    )

  def client_dataset(self, client_id: str, round_num: int) -> Any:
    """Returns a client's batches."""
    return self.data.client_dataset([client_id], **self._draw(round_num))

  def client_datasets(self, round_num: int) -> list[Any]:
    """Returns the batches of all clients."""
    return [self.client_dataset(c, round_num) for c in self.data.client_ids]

  def client_arrays(self, round_num: int) -> list[list[Any]]:
    """Returns the batches of all clients as NumPy arrays."""
    import numpy as np

    return [
        [(np.array(x), np.array(y)) for x, y in dataset]
        for dataset in self.client_datasets(round_num)
    ]

  def late_datasets(self, round_num: int) -> list[Any]:
    """Returns datasets that are built when their client is computed."""
    from tff_bn.training import round_data

    return [
        round_data.RoundDataset(self.data, [c], **self._draw(round_num))
        for c in self.data.client_ids
    ]

  def compute(self, state: Any, datasets: Sequence[Any]) -> harness.Result:
    """Computes a round in TFF's current context."""
    output = self.process.next(state, datasets)
    train = output.metrics['client_work']['train']
    return harness.Result(
        self.model.from_model_weights(
            self.process.get_model_weights(output.state)
        ),
        [train['loss'], train['accuracy']],
    )


def federated_data(row: Row) -> Any:
  """Returns a `FederatedData`: digits for small_cnn, else random images."""
  import numpy as np

  from tff_bn import data

  rng = np.random.default_rng([0, row.num_clients])
  num_samples = row.num_steps * row.batch_size
  if row.model == 'small_cnn':
    dataset = data.load_dataset('digits')
    # Clients share examples, because digits has too few for 1,000 clients.
    num_samples = min(num_samples, len(dataset.y_train))
    parts = [
        rng.choice(len(dataset.y_train), num_samples, replace=False)
        for _ in range(row.num_clients)
    ]
  else:
    total = row.num_clients * num_samples
    x = rng.integers(0, 256, (total, 32, 32, 3), np.uint8)
    y = rng.integers(0, harness.NUM_CLASSES, total, np.int32)
    dataset = data.Dataset('random', x, y, x[:0], y[:0], harness.NUM_CLASSES)
    parts = np.split(np.arange(total), row.num_clients)
  return harness.federated_data(dataset, parts)
