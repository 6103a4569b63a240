"""The values of training's options by name, importable without TensorFlow."""

from collections.abc import Mapping

# Name -> which clients' own models are saved as Keras files.
SAVE_CLIENT_MODELS: Mapping[str, str] = {
    'none': 'no client; the arrays of all sampled clients are in clients.npy',
    'sampled': 'each client that was sampled for a round',
    'all': (
        'each client; one that was never sampled has the global model, with its'
        ' own personal phases'
    ),
}
