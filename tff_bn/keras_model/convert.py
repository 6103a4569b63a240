"""Replaces the batch normalization layers of existing Keras models."""

from collections.abc import Callable, Sequence
import dataclasses
import itertools
from typing import Any, Optional

import keras

from tff_bn.keras_model import keras_copy
from tff_bn.keras_model import keras_graph
from tff_bn.keras_model import replacements
from tff_bn.layers import converted_layer
from tff_bn.layers import discovery


def convert_batch_norm(
    model: keras.Model,
    to: str = 'federated',
    *,
    groups: Optional[int] = None,
    adjust_groups: bool = False,
) -> keras.Model:
  """Copies a model and changes the class of its batch normalization layers.

  The architecture, names, weights, `trainable` flags and dtype policies are
  kept. Nested models, shared layers, and layers in wrappers such as
  `keras.layers.TimeDistributed` are converted, too. The given model does not
  change, and the new model has its own weights.

  The new layers are batch normalization layers, unless `to` is `'group'` or
  `'layer'`. In inference mode, both models compute the same. Only
  `tff_bn.layers.HybridBatchNormalization` has a weight `mixing`: it starts at
  0, and it is dropped if the new class does not have it. So are the arguments
  `r_max` and `d_max` of `tff_bn.layers.BatchRenormalization`.

  `'frozen'` gives layers with `trainable=False`. Keras runs such a layer in
  inference mode, also in training: the moving statistics, scale and shift are
  constants, as in detection models that start from a pretrained backbone. A
  `BatchNormModel` does not send them. `model.trainable = True` would unfreeze
  them.

  `'group'` (Wu and He, Group Normalization, ECCV 2018, arXiv:1803.08494) and
  `'layer'` (Ba, Kiros, Hinton, Layer Normalization, 2016, arXiv:1607.06450)
  normalize each example by itself, so there are no moving statistics, and
  clients with different data normalize alike. Scale and shift, `epsilon` and
  the axis of the channels are kept, with regularizers and constraints. The
  statistics are dropped: the model computes something else than before and
  must be trained. Layer normalization is over the channels, separately at each
  position. Group normalization is over the channels of a group and all
  positions of an example. It ignores masks: padding counts.

  Custom layers and models may contain batch normalization layers as attributes,
  or in lists, tuples and dictionaries. Their class must create these layers in
  `__init__` and must have a configuration (`get_config`), as for saving the
  model. Such a layer gets a class derived from its own one, with the same name,
  whose configuration also describes the new layers. So `model.save` and
  `keras.models.clone_model` keep them. Whoever loads the saved model must
  import `tff_bn.layers` before, and give Keras the custom classes as for the
  original model (`keras.saving.register_keras_serializable` or
  `custom_objects`). A subclassed model cannot be loaded from the old format
  `.h5`; save it as `.keras`.

  The new model is not compiled.

  Example:
  ```
  model = keras.applications.ResNet50(weights=None, classes=10)
  federated = tff_bn.convert_batch_norm(model)
  federated.compile('sgd', 'sparse_categorical_crossentropy')
  ...
  model = tff_bn.convert_batch_norm(federated, to='batch')

  without_statistics = tff_bn.convert_batch_norm(model, 'group', groups=16)
  ```

  Args:
    model: A Keras model.
    to: `'federated'` for `tff_bn.layers.FederatedBatchNormalization`,
      `'hybrid'` for `tff_bn.layers.HybridBatchNormalization`,
      `'batch_renorm'` for `tff_bn.layers.BatchRenormalization`, `'batch'` for
      `keras.layers.BatchNormalization`, or `'synchronized'` for
      `keras.layers.BatchNormalization(synchronized=True)`, whose replicas in a
      `tf.distribute` strategy share their batch statistics. `'synchronized'`
      needs the TensorFlow backend. `'frozen'` for
      `keras.layers.BatchNormalization(trainable=False)`, `'group'` for
      `keras.layers.GroupNormalization`, or `'layer'` for
      `keras.layers.LayerNormalization`.
    groups: The number of groups of `'group'`. It must divide the channels of
      every layer. -1: as many as channels (instance normalization). Default:
      32.
    adjust_groups: Whether each layer has the greatest common divisor of
      `groups` and its number of channels as its number of groups. So `groups`
      need not divide the channels.

  Returns:
    The new model.

  Raises:
    TypeError: If `model` is not a Keras model, `groups` not an integer, or
      `adjust_groups` not a bool.
    ValueError: If `to` is unknown, the model has no batch normalization,
      `groups` does not divide the channels of a layer, or is given for another
      target than `'group'`, the output of a new layer would not depend on its
      input, because it would normalize single numbers, or the model or a layer
      can't be converted. The message names the layer and gives advice.
  """
  target = replacements.find_target(to, groups, adjust_groups, model)
  if not discovery.batch_norm_layers(model):
    raise ValueError(
        f'The model {model.name!r} has no batch normalization layer to convert.'
    )
  is_frozen = to == 'frozen'
  copy = _Conversion(
      lambda norm: _new_norm(norm, target), keeps_flags=is_frozen
  )
  try:
    new_model = copy.layer(model)
    if model.built and not keras_copy.is_functional(model):
      keras_copy.build(new_model, model.get_build_config())
  except TypeError as cause:
    # Of Keras, for a layer whose `call` has no such argument.
    if target.is_batch_norm or "argument 'mask'" not in str(cause):
      raise
    raise ValueError(
        f'A custom layer of the model {model.name!r} calls its batch'
        f' normalization layer with the argument mask, which to={to!r} does not'
        ' have. Call it without mask: Keras hands the mask on by itself.'
    ) from cause
  copy.check()
  expected, found = (_num_weights(x, target) for x in (model, new_model))
  error = (
      f'The model {model.name!r} has {expected} weights, but its copy {found},'
      ' because'
  )
  if found < expected:
    if keras_copy.is_functional(model) and not keras_copy.is_connected(model):
      error = (
          f'The model {model.name!r} has been called, but is not connected to'
          ' an input, so its copy cannot be built. Start it with a keras.Input,'
          ' or build it as a functional model, keras.Model(inputs, outputs).'
      )
    else:
      error += (
          ' Keras could not build all layers of the copy. A custom layer must'
          ' create the layers inside it in its `__init__` and call them as its'
          ' attributes.'
      )
    raise ValueError(error)
  copy.set_state(model)
  if found != expected:
    raise ValueError(
        f'{error} layers share weights that their copies do not share. Build'
        ' the model with the layers that you want.'
    )
  if is_frozen:
    for norm in discovery.batch_norm_layers(new_model):
      norm.trainable = False
  _check_lasts(new_model)
  return new_model


def with_batch_norms(
    layer: keras.Layer, norms: Sequence[keras.Layer]
) -> keras.Layer:
  """Copies a custom layer or model with given batch normalization layers.

  Args:
    layer: A layer or model that is not built, as its class makes it.
    norms: The new layers, in the order of `converted_layer.norm_layers`.

  Returns:
    The copy, a `ConvertedLayer` if its class does not make such layers itself.
  """
  made = converted_layer.norm_layers(layer)
  if len(made) != len(norms):
    raise ValueError(
        f'{type(layer).__name__} makes {len(made)} batch normalization layers,'
        f' but the configuration of the {keras_copy.noun(layer)}'
        f' {layer.name!r} has {len(norms)}: it was saved with another version'
        ' of the class.'
    )
  new = {id(old): norm for old, norm in zip(made, norms)}
  return _Conversion(lambda norm: new[id(norm)], keeps_flags=True).layer(layer)


def _check_lasts(model: keras.Model) -> None:
  """Raises a `ValueError` if saving a copy would lose its new layers."""
  converted: list[Any] = [
      layer
      for layer in discovery.all_layers(model)
      if isinstance(layer, converted_layer.ConvertedLayer)
  ]
  for layer in converted:
    if _configs(keras_copy.from_config(layer)) != _configs(layer):
      kind = type(layer).__name__
      raise ValueError(
          f'The {keras_copy.noun(layer)} {layer.name!r} ({kind}) would lose its'
          ' new batch normalization layers when it is saved and loaded, because'
          f' its class creates others each time. Change {kind} to create the'
          ' layers that you want.'
      )


def _keep_batch_norms(layer: keras.Layer, *, keeps_flags: bool) -> None:
  """Sets a copy's class so that its configuration has the replaced layers.

  The copy gets its own class if that remakes it, otherwise a `ConvertedLayer`.

  Args:
    layer: The copy.
    keeps_flags: Whether its own class must also remake the `trainable` flags.
      Keras itself does not save such flags of layers inside a custom layer.
  """
  own_class: Any = converted_layer.own_class(layer)
  _set_class(layer, own_class)
  try:
    made = keras_copy.from_config(layer)
  except ValueError:
    # Keras cannot save this layer, either. The layer that contains it may have
    # a configuration.
    return
  ignored = ('name',) if keeps_flags else ('name', 'trainable')
  norms = [
      pair
      for pair in itertools.zip_longest(*map(_layers_inside, (made, layer)))
      if any(map(converted_layer.is_norm, pair))
  ]
  if any(
      type(a) is not type(b) or _config(a, ignored) != _config(b, ignored)
      for a, b in norms
  ):
    _set_class(layer, converted_layer.converted_class(own_class))
    return
  for a, b in norms:
    if not converted_layer.is_norm(a):
      # The configuration of its own class contains the new layer.
      converted_layer.unmark_replacement(b)


def _layers_inside(layer: keras.Layer) -> list[keras.Layer]:
  # A `Sequential` model gets an input layer when it is built.
  return [
      each
      for each in discovery.all_layers(layer)
      if not isinstance(each, keras.layers.InputLayer)
  ]


def _set_class(layer: keras.Layer, layer_class: type[keras.Layer]) -> None:
  # Keras would track an attribute.
  object.__setattr__(layer, '__class__', layer_class)


def _configs(layer: keras.Layer) -> list[Any]:
  """Describes the normalization layers inside a layer."""
  return [_config(norm) for norm in converted_layer.norm_layers(layer)]


def _config(norm: keras.Layer, ignored: Sequence[str] = ()) -> Any:
  """Describes a layer by its class and arguments."""
  return (
      type(norm),
      # Arrays cannot be compared by `==`.
      {k: repr(v) for k, v in norm.get_config().items() if k not in ignored},
  )


def _num_weights(model: keras.Model, target: replacements.Target) -> int:
  """Counts the weights that do not depend on the class of the layers."""
  specific = {
      id(variable)
      for layer in discovery.batch_norm_layers(model)
      for variable in layer.variables
      if target.is_specific(variable)
  }
  return sum(id(weight) not in specific for weight in model.weights)


def _new_norm(layer: keras.Layer, target: replacements.Target) -> keras.Layer:
  """Makes the replacement of a layer that `norm_layers` has found."""
  if discovery.is_batch_norm(layer):
    return target.new(layer)
  return keras_copy.from_config(layer)  # It was replaced before.


class _Conversion(keras_copy.Copy):
  """Copies layers and replaces the batch normalization layers."""

  def __init__(
      self,
      new_norm: Callable[[keras.Layer], keras.Layer],
      *,
      keeps_flags: bool,
  ):
    """Takes a function that replaces a layer, see `_keep_batch_norms`."""
    super().__init__()
    self._new_norm = new_norm
    self._keeps_flags = keeps_flags
    # Batch normalization layers that were replaced before they were built, with
    # the layers that created them.
    self._replaced: list[tuple[keras.Layer, keras.Layer]] = []

  def check(self) -> None:
    """Raises a `ValueError` if a layer still uses a replaced layer."""
    for layer, parent in self._replaced:
      if layer.built:
        raise ValueError(_own_norm_error(parent, layer))

  def _new(self, layer: keras.Layer) -> keras.Layer:
    if converted_layer.is_norm(layer):
      new = self._new_norm(layer)
      converted_layer.mark_replacement(new)
      return new
    if keras_copy.is_functional(layer):
      return self._new_functional(layer)
    inside = converted_layer.norm_layers(layer)
    if not inside:
      return keras_copy.from_config(layer)
    if isinstance(layer, keras.layers.Wrapper) and set(inside) <= set(
        converted_layer.norm_layers(layer.layer)
    ):
      config = layer.get_config()
      del config['layer']
      own_class = converted_layer.own_class(layer)
      return own_class(self.layer(layer.layer), **config)
    copy = keras_copy.from_config(layer)
    self._replace_inside(layer, copy)
    converted = {id(new) for _, new in self._copies.values()}
    found = {id(norm) for norm in converted_layer.norm_layers(copy)}
    present = {id(each) for each in discovery.all_layers(copy)}
    is_lost = any(
        id(norm) not in self._copies
        or id(self._copies[id(norm)][1]) not in present
        for norm in inside
    )
    if is_lost or not found <= converted:
      raise ValueError(_own_norm_error(layer, inside[0]))
    _keep_batch_norms(copy, keeps_flags=self._keeps_flags)
    return copy

  def _repeat(
      self,
      call: keras_graph.Call,
      layer: keras.Layer,
      tensors: dict[int, keras.KerasTensor],
  ) -> list[keras.KerasTensor]:
    if discovery.is_batch_norm(call.layer) and not discovery.is_batch_norm(
        layer
    ):
      # The other classes have no mode and no statistics.
      kwargs = {
          key: value
          for key, value in call.kwargs.items()
          if key not in ('training', 'mask')
      }
      call = dataclasses.replace(call, kwargs=kwargs)
    return super()._repeat(call, layer, tensors)

  def _replace_inside(self, layer: keras.Layer, copy: keras.Layer) -> None:
    """Replaces the layers that the constructor of a layer's copy created."""
    # PyTorch stores modules apart from other attributes.
    names = [*vars(layer), *vars(layer).get('_modules', ())]
    for name in names:
      old, new = (getattr(x, name, None) for x in (layer, copy))
      replacement = self._replacement(old, new, copy)
      if replacement is not new:
        setattr(copy, name, replacement)

  def _replacement(self, old: Any, new: Any, parent: keras.Layer) -> Any:
    """Returns the value of an attribute of a copy, with layers replaced.

    Args:
      old: The value in the original layer.
      new: The value in the copy. A list or dictionary is changed in place.
      parent: The copy.
    """
    if isinstance(old, keras.Layer):
      inside = converted_layer.norm_layers(old)
      if not inside:
        return new
      if not isinstance(new, keras.Layer):
        raise ValueError(_own_norm_error(parent, inside[0]))
      return self._replacement_of_layer(old, new, parent)
    if type(old) is not type(new):
      return new
    # Keras wraps lists and dictionaries that contain layers.
    if isinstance(old, list) and hasattr(old, 'tracker'):
      for i, (old_item, new_item) in enumerate(zip(old, new)):
        new[i] = self._replacement(old_item, new_item, parent)
    elif isinstance(old, dict) and hasattr(old, 'tracker'):
      for key in old.keys() & new.keys():
        new[key] = self._replacement(old[key], new[key], parent)
    elif isinstance(old, tuple):
      values = [self._replacement(x, y, parent) for x, y in zip(old, new)]
      if any(x is not y for x, y in zip(values, new)):
        is_named = hasattr(old, '_fields')
        return type(new)(*values) if is_named else type(new)(values)
    return new

  def _replacement_of_layer(
      self, old: keras.Layer, new: keras.Layer, parent: keras.Layer
  ) -> keras.Layer:
    if (
        id(old) not in self._copies
        and converted_layer.own_class(old) is converted_layer.own_class(new)
        and not isinstance(old, keras.layers.Wrapper)
        and not converted_layer.is_norm(old)
        and not keras_copy.is_functional(old)
    ):
      # No configuration is needed.
      self._replace_inside(old, new)
      _keep_batch_norms(new, keeps_flags=self._keeps_flags)
      self._copies[id(old)] = old, new
      return new
    if (
        id(old) not in self._copies
        and isinstance(old, keras.Sequential)
        and keras_copy.is_functional(old)
        and not keras_copy.is_connected(new)
    ):
      # Its first call connects it to an input, so that its weights get the same
      # paths.
      self._copies[id(old)] = old, self._new_sequential(old, False)
    replacement = self.layer(old)
    if replacement is not new:
      # Keras still tracks the old attribute. The replacement takes its place,
      # because the order of the layers is the order of the weights.
      tracker = parent._tracker
      if tracker.is_in_store('layers', replacement):
        tracker.untrack(new)
      elif tracker.is_in_store('layers', new):
        tracker.replace_tracked_value('layers', new, replacement)
      self._replaced += [
          (layer, parent)
          for layer in converted_layer.norm_layers(new)
          if not layer.built
      ]
    return replacement


def _own_norm_error(layer: keras.Layer, norm: keras.Layer) -> str:
  kind = type(layer).__name__
  return (
      f'The {keras_copy.noun(layer)} {layer.name!r} ({kind}) creates the batch'
      f' normalization layer {norm.name!r} in a way that prevents replacing it.'
      f' Make it an attribute in the `__init__` of {kind}, call it in a'
      f' functional model, or change {kind} to create the layer that you want.'
  )
