"""Position-aware neurons, and permutations of the units of layers.

Members are imported when they are first used. `add_position_encodings` needs
only Keras, the others TensorFlow, too.
"""

from tff_bn.imports import lazy

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'UnitGroup': 'unit_slots',
    'UnitOccurrence': 'unit_slots',
    'add_position_encodings': 'position_encodings',
    'kept_share': 'permutation',
    'mean_kept_share': 'permutation',
    'permute_units': 'permutation',
    'random_permutation': 'permutation',
    'shuffle_error': 'permutation',
    'shuffle_units': 'permutation',
    'unit_groups': 'tied_units',
}

__all__ = sorted(_MEMBERS)

__getattr__, __dir__ = lazy.attach(__name__, _MEMBERS)
