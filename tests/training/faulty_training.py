"""Trainings for `faults`, in the folder that they get."""

import training_fakes

from tff_bn import training

CONFIG = training.TrainingConfig(
    rounds=3,
    batch_size=4,
    local_steps=1,
    clients_per_round=2,
    evaluate_every=2,
    checkpoint_every=1,
    save_client_models='all',
)
KEPT_BEST = training.TrainingConfig(
    rounds=4,
    batch_size=4,
    local_steps=1,
    clients_per_round=2,
    evaluate_every=1,
    checkpoint_every=2,
    keep_best='accuracy',
    client_metrics_over_time=True,
)


def train(run_dir):
  """Trains, and saves the models of the clients."""
  training_fakes.train(
      training_fakes.build_model(), run_dir, CONFIG, stateful=True
  )


def keep_best(run_dir):
  """Trains, and keeps the best model and the metrics of the clients."""
  training_fakes.train(
      training_fakes.build_model(),
      run_dir,
      KEPT_BEST,
      data=training_fakes.ValidatedData(),
  )
