"""Model architectures, built by name or by a user's function.

Each function `build_...` of a model has the same arguments: `input_shape`, the
shape of a sample; `num_outputs`, the number of outputs; and `normalization`,
the normalization of its hidden layers, a key of `NORMALIZATIONS` or `group<N>`.
It returns an untrained functional model whose outputs are logits, or plain
numbers for a regression. The entries in `MODELS` say which samples a model
takes: images of shape `[height, width, channels]`, series of shape `[steps,
features]`, vectors of features, or samples of any shape, which it flattens.
`initial_model_fn` starts from a file instead.

`MODELS` and `NORMALIZATIONS` are in `tff_bn.catalog.models`, which does not
import Keras. Keras is imported when a model is first used.
"""

from tff_bn.catalog.models import MODELS
from tff_bn.catalog.models import NORMALIZATIONS
from tff_bn.imports import lazy

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'build_model_fn': 'building',
    'build_vgg': 'convolutional',
    'initial_model_fn': 'initial_model',
}
for _model in MODELS.values():
  _module, _, _function = str(_model.builds).partition(':')
  _MEMBERS[_function] = _module.rpartition('.')[2]

__all__ = ['MODELS', 'NORMALIZATIONS', *_MEMBERS]

__getattr__, __dir__ = lazy.attach(__name__, _MEMBERS)
