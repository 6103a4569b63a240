"""FedPAN's measurements of the units of trained models.

Members are imported when they are first used; they need TensorFlow.
"""

from tff_bn.imports import lazy

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'Match': 'matching',
    'agreeing_share': 'preference',
    'align': 'fusion',
    'diagonal_share': 'matching',
    'hidden_layers': 'layer_outputs',
    'interpolate': 'fusion',
    'layer_activations': 'matching',
    'match_layers': 'matching',
    'optimal_assignment': 'matching',
    'preference_vectors': 'preference',
    'preference_vectors_by_layer': 'preference',
    'preferred_classes': 'preference',
    'weight_divergence': 'divergence',
    'weight_divergence_by_layer': 'divergence',
}

__all__ = sorted(_MEMBERS)

__getattr__, __dir__ = lazy.attach(__name__, _MEMBERS)
