"""Measurements on algorithms, on what training sends and on trained models.

Parts that need TensorFlow or TensorFlow Federated are imported when they are
first used.
"""

from typing import Any

from tff_bn import dependencies
from tff_bn import lazy
from tff_bn.analysis import normalization_error

# Name -> the module of this package in which it is defined. These need
# TensorFlow Federated,
_WITH_TFF = {
    'Direction': 'communication',
    'Message': 'communication',
    'ProcessTraffic': 'communication',
    'Traffic': 'communication',
    'computation_traffic': 'communication',
    'messages': 'communication',
}
# and these TensorFlow only.
_WITHOUT_TFF = {
    'Match': 'matching',
    'UnitGroup': 'permutation',
    'UnitOccurrence': 'permutation',
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
    'unit_groups': 'permutation',
    'weight_divergence': 'divergence',
    'weight_divergence_by_layer': 'divergence',
}

__all__ = [
    'Direction',
    'Match',
    'Message',
    'ProcessTraffic',
    'Traffic',
    'UnitGroup',
    'UnitOccurrence',
    'agreeing_share',
    'align',
    'computation_traffic',
    'diagonal_share',
    'hidden_layers',
    'interpolate',
    'kept_share',
    'layer_activations',
    'match_layers',
    'mean_kept_share',
    'messages',
    'normalization_error',
    'optimal_assignment',
    'permute_units',
    'preference_vectors',
    'preference_vectors_by_layer',
    'preferred_classes',
    'random_permutation',
    'shuffle_error',
    'shuffle_units',
    'unit_groups',
    'weight_divergence',
    'weight_divergence_by_layer',
]

_load, __dir__ = lazy.attach(__name__, {**_WITH_TFF, **_WITHOUT_TFF})


def __getattr__(name: str) -> Any:
  if name in _WITH_TFF:
    dependencies.require_tff()
  return _load(name)
