"""FedBN's toy example against closed forms."""

import numpy as np
import pytest

from tff_bn.papers.simulations import fedbn_toy

_SETTINGS = fedbn_toy.Settings()


@pytest.fixture(scope='module')
def result():
  return fedbn_toy.run(_SETTINGS)


@pytest.mark.parametrize('client', [0, 1])
def test_loss_approaches_its_expectation(client):
  settings = fedbn_toy.Settings(num_points=100_000)
  points = fedbn_toy.draw_points(settings)[client]
  weights = np.linspace(0, 6, 9)
  for scale in (1.0, 0.7):
    np.testing.assert_allclose(
        fedbn_toy.squared_loss(points, weights, scale),
        fedbn_toy.expected_loss(
            settings, settings.deviations[client], weights, scale
        ),
        atol=0.015,
    )


def test_expectation_by_quadrature():
  nodes, quadrature = np.polynomial.hermite_e.hermegauss(80)
  quadrature /= quadrature.sum()
  for weight, deviation, scale in ((0.4, 2.0, 1.0), (3.0, 0.5, 0.8)):
    errors = np.cos(weight * deviation / scale * nodes) - np.cos(2 * nodes)
    np.testing.assert_allclose(
        fedbn_toy.expected_loss(_SETTINGS, deviation, weight, scale),
        quadrature @ errors**2 + 0.1**2,
        rtol=1e-8,
    )


def test_points():
  clients = fedbn_toy.draw_points(fedbn_toy.Settings(num_points=50_000))
  for points, deviation in zip(clients, (0.5, 2.0), strict=True):
    np.testing.assert_allclose(points.scale, deviation, rtol=0.02)
    noise = points.y - np.cos(2.0 * points.x / deviation)
    np.testing.assert_allclose(noise.std(), 0.1, rtol=0.02)
    assert abs(noise.mean()) < 0.002
  again = fedbn_toy.draw_points(fedbn_toy.Settings(num_points=50_000))
  np.testing.assert_array_equal(clients[1].x, again[1].x)
  other = fedbn_toy.draw_points(fedbn_toy.Settings(num_points=50_000, seed=1))
  assert (clients[1].x != other[1].x).all()


def test_without_bn_clients_need_different_weights(result):
  # w* / σ.
  np.testing.assert_allclose(result.without_bn.best, [4, 1], atol=0.06)


def test_local_bn_makes_the_losses_similar(result):
  np.testing.assert_allclose(result.with_bn.best, [2, 2], atol=0.06)
  different, similar = (
      abs(np.subtract(*curves.losses)).mean()
      for curves in (result.without_bn, result.with_bn)
  )
  assert similar < 0.1 * different


def test_choices(result):
  choices = {choice.name: choice for choice in result.choices}
  assert len(choices) == 5
  for name, choice in choices.items():
    # The loss of each client's weight and scale.
    for points, *numbers in zip(
        fedbn_toy.draw_points(_SETTINGS),
        choice.weights,
        choice.scales,
        choice.losses,
        strict=True,
    ):
      weight, scale, loss = numbers
      error = np.cos(weight * points.x / scale) - points.y
      np.testing.assert_allclose(loss, np.mean(error**2))
    if 'average weight' in name:
      assert choice.weights[0] == choice.weights[1]
  # The paper's statements: averaging is harmless with local BN only.
  noise = 0.1**2
  for name in ('local weights, no BN', 'local weights, local BN'):
    assert (choices[name].losses < 1.3 * noise).all()
  assert (choices['average weight, local BN'].losses < 1.3 * noise).all()
  for name in ('average weight, no BN', 'average weight, average BN'):
    assert (choices[name].losses > 20 * noise).all()
  scales = choices['average weight, average BN'].scales
  np.testing.assert_allclose(scales, 1.25, rtol=0.05)


def test_surface(result):
  surface = result.surface
  points = fedbn_toy.draw_points(_SETTINGS)[0]
  for row, column in ((3, 5), (200, 100)):
    error = (
        np.cos(surface.weights[column] * points.x / surface.scales[row])
        - points.y
    )
    np.testing.assert_allclose(surface.losses[row, column], np.mean(error**2))
  assert surface.scales[0] > 0
  assert surface.scales[-1] >= 2.5


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(deviations=(1.0,)), 'deviations='),
        (dict(deviations=(1.0, 0.0)), 'deviations='),
        (dict(weight=0.0), 'weight=0.0'),
        (dict(noise=-1.0), 'noise=-1.0'),
        (dict(num_points=1), 'num_points=1'),
        (dict(grid_size=1), 'grid_size=1'),
    ],
)
def test_wrong_settings(changes, message):
  with pytest.raises(ValueError, match=message):
    fedbn_toy.Settings(**changes)
