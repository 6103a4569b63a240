"""The options of the server's step."""

from tff_bn.catalog import value_types
from tff_bn.catalog.options import OWN_NAME
from tff_bn.catalog.options import Option
from tff_bn.catalog.options import declared
from tff_bn.catalog.options import only_for

# The server's optimizers with their default learning rates.
LEARNING_RATES = {'sgd': 1.0, 'sgdm': 0.1, 'adam': 0.01, 'yogi': 0.01}

SERVER_OPTIMIZER = Option(
    'server_optimizer',
    value_types.Choice(LEARNING_RATES),
    "The optimizer that the server applies to the mean of the clients' changes"
    f' (FedOpt): {", ".join(LEARNING_RATES)}; sgd with learning rate 1 is plain'
    ' averaging',
    'sgd',
    feature=OWN_NAME,
)
SERVER_LEARNING_RATE = Option(
    'server_learning_rate',
    value_types.POSITIVE,
    "The server's learning rate",
    compute=lambda options: LEARNING_RATES[options.server_optimizer],
    default_text=', '.join(
        f'{rate:g} for {name}' for name, rate in LEARNING_RATES.items()
    ),
    feature=SERVER_OPTIMIZER.name,
)
SERVER_MOMENTUM = Option(
    'server_momentum',
    value_types.MOMENTUM,
    'Momentum of --server_optimizer=sgdm',
    0.9,
    conditions=(only_for('server_optimizer', 'sgdm'),),
    feature=SERVER_OPTIMIZER.name,
)
SERVER_CLIP_NORM = Option(
    'server_clip_norm',
    value_types.POSITIVE,
    "Largest global norm of the mean of the clients' changes of the trainable"
    ' variables, which is scaled down to it before --server_optimizer',
    default_text='any',
    argument=OWN_NAME,
    feature=OWN_NAME,
)
OPTIONS = declared(vars())
