"""The public workloads with plain PyTorch, pfl-research and Flower."""

from collections.abc import Callable
import functools
import itertools
import logging
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any, Optional

import numpy as np
import torch
from torch import nn
import workload_data
from workload_data import ROUND
from workload_data import TEST
from workload_data import TEST_BATCH_SIZE


def build_model(workload: workload_data.Workload) -> nn.Module:
  """Builds the model, which takes images with the channels last."""

  def convolve(inputs, outputs):
    layers = [nn.Conv2d(inputs, outputs, 3)]
    if workload.kind == 'cnn_bn':
      layers.append(nn.BatchNorm2d(outputs, eps=1e-5, momentum=0.1))
    return [*layers, nn.ReLU()]

  if workload.kind == 'linear':
    layers = [nn.Flatten()]
    last = workload.flat_size
  else:
    layers = [
        _ChannelsFirst(),
        *convolve(workload.image_shape[-1], 32),
        *convolve(32, 64),
        nn.MaxPool2d(2),
        nn.Dropout(0.25 * workload.has_dropout),
        nn.Flatten(),
        nn.Linear(workload.flat_size, 128),
        nn.ReLU(),
        nn.Dropout(0.5 * workload.has_dropout),
    ]
    last = 128
  model = nn.Sequential(*layers, nn.Linear(last, workload.num_classes))
  _set_weights(model, workload)
  return model


class _ChannelsFirst(nn.Module):
  """Moves the channels of images to PyTorch's axis."""

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Returns a view of the images."""
    return x.permute(0, 3, 1, 2)


def _set_weights(model: nn.Module, workload: workload_data.Workload) -> None:
  """Sets the weights to `workload_data.initial_weights`."""
  values = iter(workload_data.initial_weights(workload))
  height, width, _ = workload.image_shape
  state = model.state_dict()
  for name, variable in state.items():
    if name.endswith('num_batches_tracked'):
      continue
    value = next(values)
    if value.ndim == 4:
      value = value.transpose(3, 2, 0, 1)
    elif value.ndim == 2:
      if workload.kind != 'linear' and len(value) == workload.flat_size:
        # PyTorch flattens the channels first.
        size = ((height - 4) // 2, (width - 4) // 2, 64, -1)
        value = value.reshape(size).transpose(2, 0, 1, 3)
        value = value.reshape(workload.flat_size, -1)
      value = value.T
    variable.copy_(torch.from_numpy(np.ascontiguousarray(value)))


def _tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
  """Converts scaled images and labels."""
  return torch.from_numpy(x), torch.from_numpy(y).long()


def _test_tensors(
    source: workload_data.Data,
) -> tuple[torch.Tensor, torch.Tensor]:
  return _tensors(workload_data.scale(source.x_test), source.y_test)


def _train(
    model: nn.Module,
    source: workload_data.Data,
    workload: workload_data.Workload,
    number: int,
) -> float:
  """Trains one client for an epoch, and returns the mean loss."""
  x, y = _tensors(*source.scaled_client(number))
  optimizer = torch.optim.SGD(model.parameters(), workload.learning_rate)
  model.train()
  total = 0.0
  for part in torch.randperm(len(y)).split(workload.batch_size):
    loss = nn.functional.cross_entropy(model(x[part]), y[part])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item() * len(part)
  return total / len(y)


@torch.no_grad()
def _evaluate(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> tuple[float, float]:
  """Returns the loss and the accuracy."""
  model.eval()
  loss, right = 0.0, 0
  for images, labels in zip(x.split(TEST_BATCH_SIZE), y.split(TEST_BATCH_SIZE)):
    outputs = model(images)
    loss += nn.functional.cross_entropy(outputs, labels, reduction='sum').item()
    right += (outputs.argmax(1) == labels).sum().item()
  return loss / len(y), right / len(y)


def run_loop(
    workload: workload_data.Workload, turns: workload_data.Turns
) -> None:
  """Trains with a loop over the clients, one after the other."""
  source = workload_data.Data(workload)
  tests = _test_tensors(source)
  model = build_model(workload)

  def test():
    turns.begin()
    loss, accuracy = _evaluate(model, *tests)
    turns.end(TEST, loss=loss, accuracy=accuracy)

  turns.ready()
  test()
  for round_num in range(1, workload.rounds + 1):
    turns.begin()
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    totals = {k: torch.zeros_like(v) for k, v in initial.items()}
    losses = []
    for number in workload.clients_of_round(round_num):
      model.load_state_dict(initial)
      losses.append(_train(model, source, workload, number))
      for name, value in model.state_dict().items():
        totals[name] += value
    model.load_state_dict(
        {k: v / workload.clients_per_round for k, v in totals.items()}
    )
    turns.end(ROUND, loss=np.mean(losses))
    if workload.is_tested(round_num):
      test()


def run_pfl(
    workload: workload_data.Workload, turns: workload_data.Turns
) -> None:
  """Trains with pfl-research in one process."""
  _run_pfl(workload, turns)


def run_two_pfl(
    workload: workload_data.Workload, turns: workload_data.Turns
) -> None:
  """Trains with pfl-research in two processes that share the clients.

  The second process is a copy of this one, without turns.
  """
  if 'RANK' in os.environ:
    torch.set_num_threads(1)
    _run_pfl(workload, _SharedTurns(None))
    return
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  # The variables of PyTorch's launcher, which pfl-research reads.
  os.environ.update(
      TORCHELASTIC_RUN_ID='workload',
      MASTER_ADDR='127.0.0.1',
      MASTER_PORT=str(port),
      WORLD_SIZE='2',
      LOCAL_WORLD_SIZE='2',
  )
  others = {'RANK': '1', 'LOCAL_RANK': '1'}
  with subprocess.Popen(
      [sys.executable, *sys.argv],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      env={**os.environ, **others},
  ) as other:
    os.environ.update(RANK='0', LOCAL_RANK='0')
    torch.set_num_threads(1)
    try:
      _run_pfl(workload, _SharedTurns(turns))
    finally:
      other.terminate()


class _SharedTurns:
  """The turns of two processes, of which the second has `None`."""

  def __init__(self, turns: Optional[workload_data.Turns]):
    self._turns = turns

  def ready(self) -> None:
    """See `workload_data.Turns`."""
    if self._turns is not None:
      self._turns.ready()

  def begin(self) -> None:
    """Waits for the turn of both processes."""
    if self._turns is not None:
      self._turns.begin()
    torch.distributed.barrier()

  def end(self, event: str, **values: Any) -> None:
    """See `workload_data.Turns`."""
    if self._turns is not None:
      self._turns.end(event, **values)


def _run_pfl(
    workload: workload_data.Workload,
    turns: workload_data.Turns | _SharedTurns,
) -> None:
  """Trains with pfl-research."""
  from pfl.aggregate.simulate import SimulatedBackend
  from pfl.aggregate.weighting import WeightByUser
  from pfl.algorithm.base import NNAlgorithmParams
  from pfl.algorithm.federated_averaging import FederatedAveraging
  from pfl.callback.base import TrainingProcessCallback
  from pfl.callback.central_evaluation import CentralEvaluationCallback
  from pfl.data.dataset import Dataset
  from pfl.data.federated_dataset import FederatedDataset
  from pfl.hyperparam.base import NNEvalHyperParams
  from pfl.hyperparam.base import NNTrainHyperParams
  from pfl.metrics import Metrics
  from pfl.metrics import Weighted
  from pfl.model.pytorch import PyTorchModel

  source = workload_data.Data(workload)

  class Model(nn.Module):
    """The model with the methods that pfl-research calls."""

    def __init__(self):
      super().__init__()
      self.net = build_model(workload)

    def forward(self, x):
      return self.net(x)

    def loss(self, x, y, eval=False):
      self.train(not eval)
      return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y, eval=True):
      self.train(not eval)
      outputs = self(x)
      loss = nn.functional.cross_entropy(outputs, y, reduction='sum').item()
      right = (outputs.argmax(1) == y).sum().item()
      return {
          'loss': Weighted(loss, len(y)),
          'accuracy': Weighted(right, len(y)),
      }

  def user_dataset(number):
    x, y = _tensors(*source.scaled_client(number))
    return Dataset((x, y), user_id=str(number), eval_kwargs={'eval': True})

  users = (
      number
      # Two processes may look ahead, past the last round.
      for round_num in itertools.count(1)
      for number in workload.clients_of_round(round_num)
  )
  users_data = FederatedDataset(user_dataset, lambda: next(users))
  net = Model()
  model = PyTorchModel(
      net,
      local_optimizer_create=torch.optim.SGD,
      central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
  )
  test_params = NNEvalHyperParams(local_batch_size=TEST_BATCH_SIZE)
  central = CentralEvaluationCallback(
      Dataset(_test_tensors(source), eval_kwargs={'eval': True}), test_params
  )

  class TakeTurns(TrainingProcessCallback):
    """Ends a turn after each round and each test."""

    def _test(self, model):
      turns.begin()
      # A round other than 0, which pfl-research does not test.
      _, metrics = central.after_central_iteration(
          None, model, central_iteration=1
      )
      found = metrics.to_simple_dict()
      loss, accuracy = (
          found[f'Central val | {name}'] for name in ('loss', 'accuracy')
      )
      turns.end(TEST, loss=loss, accuracy=accuracy)

    def on_train_begin(self, *, model):
      turns.ready()
      self._test(model)
      turns.begin()
      return Metrics()

    def after_central_iteration(
        self, aggregate_metrics, model, *, central_iteration
    ):
      turns.end(ROUND)
      round_num = central_iteration + 1
      if workload.is_tested(round_num):
        self._test(model)
      if round_num < workload.rounds:
        turns.begin()
      return False, Metrics()

  FederatedAveraging().run(
      algorithm_params=NNAlgorithmParams(
          central_num_iterations=workload.rounds,
          # Tests on the users' data, in the first round only.
          evaluation_frequency=workload.rounds,
          train_cohort_size=workload.clients_per_round,
          val_cohort_size=0,
      ),
      backend=SimulatedBackend(
          training_data=users_data,
          val_data=users_data,
          postprocessors=[WeightByUser()],
      ),
      model=model,
      model_train_params=NNTrainHyperParams(
          local_learning_rate=workload.learning_rate,
          local_num_epochs=1,
          local_batch_size=workload.batch_size,
      ),
      model_eval_params=test_params,
      callbacks=[TakeTurns()],
  )


@functools.lru_cache(maxsize=1)
def _cached_data(text: str) -> workload_data.Data:
  """Returns the data of a workload, generated once in a process."""
  return workload_data.Data(workload_data.Workload.from_json(text))


@functools.lru_cache(maxsize=1)
def _cached_model(text: str) -> nn.Module:
  """Returns a model of a workload, built once in a process."""
  return build_model(workload_data.Workload.from_json(text))


def train_flower_client(text: str, message: Any, context: Any) -> Any:
  """Answers a message of Flower's server: trains a client for an epoch."""
  from flwr.app import ArrayRecord
  from flwr.app import Message
  from flwr.app import MetricRecord
  from flwr.app import RecordDict

  workload = workload_data.Workload.from_json(text)
  model = _cached_model(text)
  model.load_state_dict(message.content['arrays'].to_torch_state_dict())
  number = context.node_config['partition-id']
  loss = _train(model, _cached_data(text), workload, number)
  metrics = {'loss': loss, 'num-examples': workload.samples_per_client}
  return Message(
      RecordDict(
          {
              'arrays': ArrayRecord(model.state_dict()),
              'metrics': MetricRecord(metrics),
          }
      ),
      reply_to=message,
  )


def run_flower(
    workload: workload_data.Workload, turns: workload_data.Turns
) -> None:
  """Trains with Flower's simulation on Ray, one core for each client."""
  os.environ.update(FLWR_TELEMETRY_ENABLED='0', RAY_USAGE_STATS_ENABLED='0')
  # Ray's workers import this module.
  folder = str(pathlib.Path(__file__).parent)
  paths = [folder, os.environ.get('PYTHONPATH', '')]
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
  from flwr.app import ArrayRecord
  from flwr.app import MetricRecord
  from flwr.clientapp import ClientApp
  from flwr.serverapp import ServerApp
  from flwr.serverapp.strategy import FedAvg
  from flwr.simulation import run_simulation

  logging.getLogger('flwr').setLevel(logging.WARNING)
  text = workload.to_json()
  client_app, server_app = ClientApp(), ServerApp()
  train: Callable[..., Any] = client_app.train()

  @train
  def _train_client(message, context):
    import workload_pytorch

    return workload_pytorch.train_flower_client(text, message, context)

  @server_app.main()
  def _main(grid, context):
    del context  # Unused.
    tests = _test_tensors(_cached_data(text))
    model = build_model(workload)

    def evaluate(round_num, arrays):
      if round_num:
        turns.end(ROUND)
      else:
        turns.ready()
      metrics = None
      if workload.is_tested(round_num) or not round_num:
        turns.begin()
        model.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = _evaluate(model, *tests)
        turns.end(TEST, loss=loss, accuracy=accuracy)
        metrics = MetricRecord({'loss': loss})
      if round_num < workload.rounds:
        turns.begin()
      return metrics

    FedAvg(
        fraction_train=workload.clients_per_round / workload.num_clients,
        fraction_evaluate=0.0,
        min_train_nodes=workload.clients_per_round,
        min_evaluate_nodes=0,
        min_available_nodes=workload.num_clients,
    ).start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=workload.rounds,
        evaluate_fn=evaluate,
    )

  run_simulation(
      server_app,
      client_app,
      num_supernodes=workload.num_clients,
      backend_config={'client_resources': {'num_cpus': 1, 'num_gpus': 0.0}},
  )
