"""FedBABU: the head keeps its initial values, and only the body is trained.

Oh, Kim, Yun, FedBABU: Toward Enhanced Representation for Federated Image
Classification, ICLR 2022.
"""

from typing import Optional

import tensorflow_federated as tff
from typing_extensions import Unpack

from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.keras_model.partition import Partition
from tff_bn.processes import averaging
from tff_bn.processes import head_layers as head_lib
from tff_bn.processes import requirements
from tff_bn.processes.options import Options
from tff_bn.processes.stateful_process import Process

__all__ = ['build_fed_babu']


def build_fed_babu(
    model: BatchNormModel,
    client_optimizer: tff.learning.optimizers.Optimizer,
    *,
    head_layers: Optional[str] = None,
    **options: Unpack[Options],
) -> Process:
  """Builds FedBABU, which trains the body of the model with a fixed head.

  All clients have the same head, with the values of the model that
  `keras_model_fn` returned. No client trains or sends it. All other variables,
  batch normalization included, are averaged as in FedAvg. In the paper, each
  client then fine-tunes the whole model on its own data, for example by Keras's
  `fit` of `model.to_keras(process.get_model_weights(state))`.

  Args:
    model: The model, with or without batch normalization.
    client_optimizer: The optimizer of local training.
    head_layers: The fixed layers: a regular expression for whole names or paths
      of layers, see `tff_bn.partition.Partition`. Default: the last layer with
      a kernel.
    **options: See `tff_bn.algorithms.Options`. `shuffle_times` must be 0.

  Returns:
    A process of the same kind as `build_fed_avg` returns.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If an option has a value that is not allowed, or the head is
      none of the model's layers, or all of them.
  """
  head = head_lib.find(model, head_layers)
  requirements.check_fixed_units('FedBABU', options)
  return averaging.build_shared(
      model,
      client_optimizer,
      partition=Partition('fedbabu', frozenset(), fixed_layers=head),
      **options,
  )
