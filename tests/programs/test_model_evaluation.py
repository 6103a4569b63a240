"""Tests for the evaluation of saved models."""

import keras
import numpy as np
import pytest

from tff_bn import data as tff_bn_data
from tff_bn.keras_model.batch_norm_model import BatchNormModel
from tff_bn.programs import model_evaluation
from tff_bn.training import saved_models


def test_loss_of_16_bit_logits_is_float32(tmp_path):
  data = tff_bn_data.split_dataset(
      tff_bn_data.load_dataset('digits'), 'iid', 2, seed=0
  )
  keras.utils.set_random_seed(0)
  model = BatchNormModel(
      lambda: keras.Sequential(
          [
              keras.layers.Input([8, 8, 1]),
              keras.layers.Flatten(),
              keras.layers.Dense(10, dtype='mixed_bfloat16'),
          ]
      ),
      data.element_spec,
      loss_fn=lambda: keras.losses.SparseCategoricalCrossentropy(
          from_logits=True
      ),
      metrics_fn=lambda: [keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )
  saved_models.write(tmp_path / 'model', model, model.initial_weights)
  saved = saved_models.SavedModels(tmp_path / 'model')

  result, *_ = model_evaluation.evaluate_run(
      saved, model, data, reestimation_batch_size=None
  )

  logits = model.to_keras(saved.weights(model)).predict(
      data.dataset.x_test, verbose=0
  )
  logits = logits.astype(np.float64)
  y = data.dataset.y_test
  losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y]
  assert result.loss == pytest.approx(losses.mean(), rel=1e-6)
  assert result.accuracy == pytest.approx((logits.argmax(axis=1) == y).mean())
