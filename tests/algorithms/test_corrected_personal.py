"""SCAFFOLD and MOON with FedRep, FedBABU and Ditto, against NumPy.

The correction acts on the variables that clients share, in the training that
they send: the second phase of FedRep, the body of FedBABU, the server's model
of Ditto. Heads and personal models are trained without it.
"""

import client_rounds
import numpy as np
import numpy_reference as reference
import pytest

from tff_bn import algorithms

pytestmark = pytest.mark.usefixtures('in_process_runtime')

_SIZES = (20, 7, 33)  # Unequal, with short last batches.
_ROUNDS = [(0, 1, 2), (0, 2), (0, 1, 2)]  # A client misses one of them.
_HEAD = (6, 7)
_BODY = tuple(range(6))
_STRENGTH = 0.7
_WEIGHT, _TEMPERATURE = 3.0, 0.4


class _Truth:
  """The three algorithms with both corrections, in NumPy."""

  def __init__(self, toy, model, algorithm, correction):
    self.algorithm = algorithm
    self.correction = correction
    self.batches = client_rounds.batches(toy, _SIZES)
    initial = model.from_model_weights(model.initial_weights)
    self.shared = range(8) if algorithm == 'ditto' else _BODY
    # The variables with gradients, which have control variates.
    self.trained = set(self.shared) - set(reference.STATISTICS)
    self.models = [list(initial) for _ in _SIZES]
    self.personal = [list(initial) for _ in _SIZES]
    self.previous = [list(initial) for _ in _SIZES]
    self.server_variates = [0.0] * 8
    self.variates = [[0.0] * 8 for _ in _SIZES]

  def _arguments(self, k):
    """Returns the arguments of `reference.train` for the correction."""
    if self.correction == 'scaffold':
      differences = [
          c - own for c, own in zip(self.server_variates, self.variates[k])
      ]
      return dict(extra=lambda weights: differences)
    before = list(self.models[k])
    previous = [
        self.previous[k][i] if i in self.shared else before[i] for i in range(8)
    ]

    def contrast(x):
      others = [reference.features(w, x) for w in (before, previous)]
      return lambda z: _WEIGHT * reference.contrast(z, *others, _TEMPERATURE)[1]

    return dict(feature_gradient=contrast)

  def _train(self, k):
    """Returns the client's model and its number of examples."""
    weights, batches = list(self.models[k]), self.batches[k]
    if self.algorithm == 'fed_rep':
      after, _, _ = reference.train(
          weights, batches, 0.1, gradients_fn=reference.without(_BODY)
      )
      for i in _HEAD:
        weights[i] = after[i]
    fixed = () if self.algorithm == 'ditto' else _HEAD
    after, num_examples, _ = reference.train(
        weights,
        batches,
        0.1,
        gradients_fn=reference.without(fixed),
        **self._arguments(k),
    )
    return after, num_examples

  def round(self, sampled):
    results = {}
    for k in sampled:
      before = list(self.models[k])
      after, num_examples = self._train(k)
      results[k] = after, num_examples
      self.personal[k], _, _ = reference.train(
          self.personal[k],
          self.batches[k],
          0.1,
          extra=reference.proximal(
              before, _STRENGTH, {*range(8)} - {*reference.STATISTICS}
          ),
      )
    is_scaffold = self.correction == 'scaffold'
    counts = [1 if is_scaffold else n for _, n in results.values()]
    mean = reference.average_models([w for w, _ in results.values()], counts)
    if is_scaffold:
      self._move_variates({k: w for k, (w, _) in results.items()})
    for k, (after, _) in results.items():
      self.models[k] = list(after)
      self.previous[k] = list(after)
    for weights in self.models:
      for i in self.shared:
        weights[i] = mean[i]

  def _move_variates(self, after):
    """Option II of SCAFFOLD."""
    changes = [0.0] * 8
    for k, weights in after.items():
      rates = 0.1 * len(self.batches[k])
      for i in self.trained:
        new = (
            self.variates[k][i]
            - self.server_variates[i]
            + (self.models[k][i] - weights[i]) / rates
        )
        changes[i] = changes[i] + new - self.variates[k][i]
        self.variates[k][i] = new
    # |S|/N of the mean over S.
    self.server_variates = [
        c + change / len(_SIZES)
        for c, change in zip(self.server_variates, changes)
    ]


_CASES = [
    (algorithm, correction)
    for algorithm in ('fed_rep', 'fed_babu', 'ditto')
    for correction in ('scaffold', 'moon')
]
_QUICK = [('ditto', 'moon')]


@pytest.mark.parametrize(
    ('algorithm', 'correction'),
    [
        case if case in _QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in _CASES
    ],
)
def test_rounds_equal_numpy(toy, algorithm, correction):
  options = (
      dict(num_clients=len(_SIZES))
      if correction == 'scaffold'
      else dict(contrastive_weight=_WEIGHT, temperature=_TEMPERATURE)
  )
  if algorithm == 'ditto':
    options['ditto_strength'] = _STRENGTH
  model, process = client_rounds.toy_process(
      f'build_{correction}',
      build_process=getattr(algorithms, f'build_{algorithm}'),
      **options,
  )
  truth = _Truth(toy, model, algorithm, correction)
  training = client_rounds.Training(process, len(_SIZES))
  data = client_rounds.datasets(toy, _SIZES)
  for sampled in _ROUNDS:
    truth.round(sampled)
    training.next_round(data, sampled)

  expected = truth.personal if algorithm == 'ditto' else truth.models
  for found, weights in zip(
      training.client_weights(model), expected, strict=True
  ):
    client_rounds.assert_close(found, weights, rtol=1e-9, atol=1e-11)
  server = training.weights(model)
  for i in truth.shared:
    np.testing.assert_allclose(
        server[i], truth.models[0][i], rtol=1e-9, atol=1e-11
    )
  names = [v.name for v in model.variables]
  for k, client in enumerate(training.clients):
    if correction == 'scaffold':
      kept = {f'control_variate_{names[i]}': i for i in truth.trained}
      values = truth.variates[k]
    else:
      kept = {f'previous_{names[i]}': i for i in truth.shared}
      values = truth.previous[k]
    found = {n for n in client if n.startswith(('control_', 'previous_'))}
    assert found == kept.keys()
    for name, i in kept.items():
      np.testing.assert_allclose(client[name], values[i], rtol=1e-9, atol=1e-11)
