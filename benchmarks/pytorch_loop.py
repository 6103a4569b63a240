"""Rounds of federated averaging with plain PyTorch, to compare times with.

PyTorch is optional; `pip install torch` installs it.
"""

from collections.abc import Callable, Sequence
import importlib.util
from typing import Any

import fed_avg_rounds
import harness


def is_installed() -> bool:
  """Whether PyTorch can be imported."""
  return importlib.util.find_spec('torch') is not None


def build_round(
    problem: fed_avg_rounds.FedAvgRounds,
) -> Callable[[Sequence[Any]], harness.Result]:
  """Returns a function that computes a round.

  Args:
    problem: The round's model and data.

  Returns:
    A function of the clients' batches, NumPy arrays. It returns the loss and
    the accuracy, and the weights in PyTorch's order and layout.
  """
  import numpy as np
  import torch

  model = _build_model(problem.row.model, problem.data.dataset.input_shape)
  initial = _from_keras(model, problem.initial)
  model.load_state_dict(initial)
  optimizer = torch.optim.SGD(model.parameters(), problem.row.learning_rate)
  loss_fn = torch.nn.CrossEntropyLoss()

  def compute_round(clients):
    totals = {name: torch.zeros_like(v) for name, v in initial.items()}
    total_examples, total_loss, num_right = 0, 0.0, 0
    for batches in clients:
      model.load_state_dict(initial)
      num_examples = 0
      for x, y in batches:
        images = torch.from_numpy(x).permute(0, 3, 1, 2)
        labels = torch.from_numpy(y).long()
        output = model(images)
        loss = loss_fn(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(y)
        num_right += (output.argmax(1) == labels).sum().item()
        num_examples += len(y)
      for name, value in model.state_dict().items():
        totals[name] += num_examples * value
      total_examples += num_examples
    return harness.Result(
        [np.asarray(v / total_examples) for v in totals.values()],
        [total_loss / total_examples, num_right / total_examples],
    )

  return compute_round


def _build_model(name: str, input_shape: Sequence[int]) -> Any:
  """Builds small_cnn or resnet20."""
  import torch
  from torch import nn

  def convolve(inputs, outputs, stride=1):
    return [
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-5, momentum=0.1),
    ]

  class Block(nn.Module):
    """A residual block with the shortcut of option A."""

    def __init__(self, inputs, outputs):
      super().__init__()
      self.stride = outputs // inputs
      self.padding = (outputs - inputs) // 2
      self.body = nn.Sequential(
          *convolve(inputs, outputs, self.stride),
          nn.ReLU(),
          *convolve(outputs, outputs),
      )

    def forward(self, x):
      shortcut = x[:, :, :: self.stride, :: self.stride]
      padding = (0, 0, 0, 0, self.padding, self.padding)
      return torch.relu(self.body(x) + nn.functional.pad(shortcut, padding))

  channels = input_shape[-1]
  if name == 'small_cnn':
    body = [
        *convolve(channels, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *convolve(16, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *convolve(32, 32),
        nn.ReLU(),
    ]
    last = 32
  else:
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    body = [*convolve(channels, 16), nn.ReLU()]
    body += [Block(a, b) for a, b in zip(widths, widths[1:])]
    last = 64
  return nn.Sequential(
      *body,
      nn.AdaptiveAvgPool2d(1),
      nn.Flatten(),
      nn.Linear(last, harness.NUM_CLASSES),
  )


def _from_keras(model: Any, values: Sequence[Any]) -> dict[str, Any]:
  """Converts Keras's weights, in the order of the layers, to a state."""
  import numpy as np
  import torch

  state = model.state_dict()
  names = [name for name in state if not name.endswith('num_batches_tracked')]
  found = {name: torch.zeros_like(v) for name, v in state.items()}
  for name, value in zip(names, values, strict=True):
    array = np.asarray(value)
    # Keras: height, width, inputs, outputs.
    axes = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[array.ndim]
    found[name] = torch.from_numpy(np.ascontiguousarray(array.transpose(axes)))
  return found
