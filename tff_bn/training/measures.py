"""What accuracies and losses are measured on: one name for each quantity.

All tables, plots, pages and printed lines use these names. Importing this
module imports no TensorFlow.
"""

from typing import Optional

# A mean is over at most this many clients, which the seed chooses.
MAX_CLIENTS = 20
# If there are at most this many clients, each of them is evaluated at the end.
MAX_TABLE_CLIENTS = 50

TRAIN = 'train_'
TEST = 'test_'
CLIENT_TEST = 'client_test_'
VALIDATION = 'validation_'
# Of the loss alone.
CLIENT_TRAIN = 'client_train_'
# Of the main metric alone.
CLIENT_DEVIATION = 'client_deviation_'
CLIENT_WORST = 'client_worst_tenth_'
SPREAD = (CLIENT_DEVIATION, CLIENT_WORST)

TRAINING_BATCHES = 'training batches of the round'
WHOLE_TEST_SET = 'whole test set'
GLOBAL_MODEL = f'global model on the {WHOLE_TEST_SET}'
OWN_MODELS = f"clients' own models on the {WHOLE_TEST_SET} (mean)"
_EITHER = (
    f"global model, or clients' own models (mean), on the {WHOLE_TEST_SET}"
)
OF_CLIENT = "each client's model on its own test data"
OWN_DATA = f'{OF_CLIENT} (mean)'
CLIENT_SPREAD = f'{OF_CLIENT} (deviation)'
WORST_CLIENTS = f'{OF_CLIENT} (worst tenth)'
VALIDATION_DATA = "each client's model on its own validation data (mean)"
OWN_TRAINING_DATA = "each client's model on its own training data (mean)"
HELD_OUT = 'global model on the own test data of clients that did not train'


def on_whole_test_set(has_client_models: Optional[bool]) -> str:
  """Names the columns `test_*` of metrics.csv.

  `has_client_models` says whether the clients have own models; None if only
  some of the runs have them, or if it is unknown.
  """
  if has_client_models is None:
    return _EITHER
  return OWN_MODELS if has_client_models else GLOBAL_MODEL


def name(column: str, has_client_models: Optional[bool]) -> str:
  """Returns the name of what a column of metrics.csv is measured on.

  It is empty if the column is no loss and no metric of a model. See
  `on_whole_test_set` for `has_client_models`.
  """
  names = {
      TRAIN: TRAINING_BATCHES,
      CLIENT_TEST: OWN_DATA,
      TEST: on_whole_test_set(has_client_models),
      VALIDATION: VALIDATION_DATA,
      CLIENT_TRAIN: OWN_TRAINING_DATA,
      CLIENT_DEVIATION: CLIENT_SPREAD,
      CLIENT_WORST: WORST_CLIENTS,
  }
  for prefix, found in names.items():
    if column.startswith(prefix):
      return found
  return ''
