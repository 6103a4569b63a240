"""Position-aware neurons, and analyses of the units of layers.

Members are imported when they are first used. `add_position_encodings` needs
only Keras, the others TensorFlow, too.
"""

from tff_bn.imports import lazy

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'Match': 'matching',
    'UnitGroup': 'unit_slots',
    'UnitOccurrence': 'unit_slots',
    'add_position_encodings': 'position_encodings',
    'agreeing_share': 'preference',
    'align': 'fusion',
    'diagonal_share': 'matching',
    'hidden_layers': 'layer_outputs',
    'interpolate': 'fusion',
    'kept_share': 'permutation',
    'layer_activations': 'matching',
    'match_layers': 'matching',
    'mean_kept_share': 'permutation',
    'optimal_assignment': 'matching',
    'permute_units': 'permutation',
    'preference_vectors': 'preference',
    'preference_vectors_by_layer': 'preference',
    'preferred_classes': 'preference',
    'random_permutation': 'permutation',
    'shuffle_error': 'permutation',
    'shuffle_units': 'permutation',
    'unit_groups': 'tied_units',
    'weight_divergence': 'divergence',
    'weight_divergence_by_layer': 'divergence',
}

__all__ = sorted(_MEMBERS)

__getattr__, __dir__ = lazy.attach(__name__, _MEMBERS)
