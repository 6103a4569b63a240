"""The clients of a round and their data."""

from collections.abc import Sequence
from typing import Union

import tensorflow as tf
import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn import runtime
from tff_bn.data import federated
from tff_bn.training import round_data
from tff_bn.training import rounds
from tff_bn.training.training_config import TrainingConfig


class RoundSampler:
  """Chooses the clients of a round and makes their datasets.

  Attributes:
    num_clients: The number of clients in a round.
    train_on_union: Whether a round has one dataset, the union of the clients'.
  """

  def __init__(
      self,
      data: federated.FederatedData,
      config: TrainingConfig,
      *,
      train_on_union: bool,
  ):
    self.num_clients = config.clients_per_round or len(data.client_ids)
    self.train_on_union = train_on_union
    self._data = data
    self._config = config
    context = tff.framework.get_context_stack().current
    # Such a context builds datasets where and when they are used.
    self._builds_datasets = isinstance(
        context, runtime.PlanContext
    ) and isinstance(data, federated.FederatedData)
    self._sample_fn = tff.simulation.build_uniform_sampling_fn(
        range(len(data.client_ids)), random_seed=config.seed
    )

  def select(self, round_num: int) -> rounds.RoundData:
    """Chooses the clients of a round by the seed, and makes their datasets."""
    all_ids = tuple(self._data.client_ids)
    numbers: Sequence[int] = range(len(all_ids))
    if self.num_clients < len(numbers):
      # Sums of floats depend on the order of the clients, so it is always the
      # order of the data.
      numbers = sorted(self._sample_fn(round_num, self.num_clients))
    ids = tuple(all_ids[number] for number in numbers)
    batch_size = self._config.batch_size
    groups: list[tuple[str, ...]] = [(client_id,) for client_id in ids]
    if self.train_on_union:
      groups = [ids]
      batch_size = self._config.union_batch_size(len(ids))
    datasets = [
        self.make_dataset(
            group,
            seed=self._config.seed,
            round_num=round_num,
            batch_size=batch_size,
            local_steps=self._config.local_steps,
            local_epochs=self._config.local_epochs,
        )
        for group in groups
    ]
    return rounds.RoundData(round_num, ids, numbers, datasets)

  def make_dataset(
      self, client_ids: Sequence[str], **draw: Unpack[round_data.Draw]
  ) -> Union[tf.data.Dataset, runtime.ClientDataset]:
    """Makes the dataset of a client, or of several clients together.

    The arguments are those of `FederatedData.client_dataset`.
    """
    if self._builds_datasets:
      return round_data.RoundDataset(self._data, client_ids, **draw)
    return self._data.client_dataset(client_ids, **draw)
