"""Tasks: what a model learns from the labels, with their losses and metrics.

A task decides the form of the labels and of the model's output. It says which
loss and metrics a run has by default. The first metric is the main one: tables,
plots and pages show it first.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
from typing import Any, Optional

from tff_bn.catalog import columns
from tff_bn.catalog import value_types
from tff_bn.catalog.options import Option
from tff_bn.catalog.parts import Part
from tff_bn.catalog.parts import PartName
from tff_bn.catalog.parts import Parts
from tff_bn.catalog.parts import listing
from tff_bn.catalog.parts import require_function
from tff_bn.common import user_functions

CLASSIFICATION = 'classification'
BINARY = 'binary'
MULTILABEL = 'multilabel'
REGRESSION = 'regression'
SEGMENTATION = 'segmentation'


@dataclasses.dataclass(frozen=True)
class Task:
  """A task.

  Attributes:
    name: The name in flags.
    description: The labels and the model's output, in a few words.
    labels: The labels in two or three words.
    loss: The default loss, a key of `LOSSES`.
    metrics: The default metrics, keys of `METRICS`; the main one is the first.
    has_classes: Whether each sample has one class, so that classes can have
      weights.
    column: The title of a column in the counts of each client's labels.
    counted: What these counts are numbers of.
  """

  name: str
  description: str
  labels: str
  loss: str
  metrics: tuple[str, ...]
  has_classes: bool = False
  column: str = 'class'
  counted: str = 'examples'


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(
            CLASSIFICATION,
            'one class for each sample: integers [n], or [n, 1]; a logit for'
            ' each class',
            'classes',
            'cross_entropy',
            ('accuracy',),
            has_classes=True,
        ),
        Task(
            BINARY,
            'yes or no for each sample: 0 or 1, or bools, [n] or [n, 1]; one'
            ' logit',
            'yes or no',
            'binary_cross_entropy',
            ('accuracy', 'auc'),
            has_classes=True,
        ),
        Task(
            MULTILABEL,
            'any number of labels for each sample: 0 or 1, or bools, [n,'
            ' labels]; a logit for each label',
            'several yes or no for each sample',
            'binary_cross_entropy',
            ('auc', 'f1'),
            column='label',
        ),
        Task(
            REGRESSION,
            'numbers for each sample: floats [n] or [n, targets]; as many'
            ' outputs',
            'floats',
            'mean_squared_error',
            ('mae', 'r2'),
            column='range of the target',
        ),
        Task(
            SEGMENTATION,
            'one class for each pixel: integers [n, height, width], or [n,'
            ' height, width, 1]; a logit for each pixel and class',
            'a class for each pixel',
            'cross_entropy',
            ('dice', 'mean_iou', 'accuracy'),
            counted='pixels',
        ),
    )
}
# The tasks in which one of several classes is right, for a sample or a pixel.
EXCLUSIVE = (CLASSIFICATION, SEGMENTATION)
# The tasks with an independent yes or no for each output.
YES_OR_NO = (BINARY, MULTILABEL)


@dataclasses.dataclass(frozen=True)
class Loss(Part):
  """A loss. Its function gets the task and returns a `keras.losses.Loss`.

  Attributes:
    word: Its name in a sentence.
    tasks: The tasks that it is for, keys of `TASKS`.
    min_outputs: The smallest number of outputs with which it has a meaning.
  """

  word: str = ''
  tasks: tuple[str, ...] = tuple(TASKS)
  min_outputs: int = 1


@dataclasses.dataclass(frozen=True)
class Metric(Part):
  """A metric.

  Its function gets the task and the number of outputs. It returns a
  `keras.metrics.Metric` with the name of this entry, for labels and outputs of
  the task, whose variables are sums over the examples.

  Attributes:
    kind: What its numbers are.
    tasks: The tasks that it is for, keys of `TASKS`.
    min_outputs: The smallest number of outputs with which it has a meaning.
  """

  kind: Optional[columns.Kind] = None
  tasks: tuple[str, ...] = tuple(TASKS)
  min_outputs: int = 1


YOUR_FUNCTION = 'a function of yours as package.module:NAME'


def _loss_of_object(name: str, function: Any) -> Loss:
  """Returns the entry of a user's function."""
  require_function(
      function,
      'a function without arguments that returns a keras.losses.Loss, or such a'
      ' class',
  )
  word = name.partition(':')[2]
  return Loss(name, 'a loss of yours', lambda task: function(), word=word)


def _metric_of_object(name: str, function: Any) -> Metric:
  """Returns the entry of a user's function."""
  require_function(
      function,
      'a function without arguments that returns a keras.metrics.Metric, or'
      ' such a class',
  )
  return Metric(name, 'a metric of yours', lambda task, num_outputs: function())


def _of_keras(
    module: str, class_name: str, takes_logits: bool, **arguments: Any
) -> Callable[..., Any]:
  """Returns a function that builds a loss or metric of Keras for a task."""

  def build(task: str, num_outputs: int = 1) -> Any:
    del num_outputs
    function = user_functions.import_object(
        'tff_bn.models.keras_objectives:build'
    )
    return function(module, class_name, task, takes_logits, **arguments)

  return build


def _keras_loss(
    name: str,
    description: str,
    for_tasks: Collection[str],
    class_name: str,
    *aliases: str,
    takes_logits: bool = False,
    min_outputs: int = 1,
    **arguments: Any,
) -> Loss:
  """Returns the entry of a loss of Keras."""
  return Loss(
      name,
      description,
      _of_keras('losses', class_name, takes_logits, **arguments),
      aliases=(class_name, *aliases),
      word=name.replace('_', ' '),
      tasks=tuple(for_tasks),
      min_outputs=min_outputs,
  )


_LOSSES = 'tff_bn.models.losses'
LOSSES: Parts[Loss] = Parts(
    Loss(
        'cross_entropy',
        'cross-entropy of the classes',
        f'{_LOSSES}:cross_entropy',
        aliases=(
            'categorical_crossentropy',
            'CategoricalCrossentropy',
            'sparse_categorical_crossentropy',
            'SparseCategoricalCrossentropy',
        ),
        word='cross-entropy',
        tasks=EXCLUSIVE,
    ),
    Loss(
        'binary_cross_entropy',
        'mean over the outputs of the cross-entropy of yes and no',
        f'{_LOSSES}:binary_cross_entropy',
        aliases=(
            'binary_crossentropy',
            'BinaryCrossentropy',
            'bce',
            'BCE',
        ),
        word='binary cross-entropy',
        tasks=YES_OR_NO,
    ),
    Loss(
        'focal',
        'cross-entropy times (1 - p)^2, where p is the probability of the right'
        ' answer: for rare classes (Lin et al. 2017)',
        f'{_LOSSES}:focal',
        word='focal',
        tasks=(*EXCLUSIVE, *YES_OR_NO),
    ),
    Loss(
        'dice',
        '1 - soft Dice, the mean over the classes other than 0 (Milletari et'
        ' al. 2016)',
        f'{_LOSSES}:dice',
        word='Dice',
        tasks=(SEGMENTATION,),
    ),
    Loss(
        'mean_squared_error',
        'squared error',
        f'{_LOSSES}:mean_squared_error',
        aliases=(
            'MeanSquaredError',
            'mse',
            'MSE',
        ),
        word='mean squared error',
        tasks=(REGRESSION,),
    ),
    Loss(
        'mean_absolute_error',
        'absolute error: large errors count less',
        f'{_LOSSES}:mean_absolute_error',
        aliases=(
            'MeanAbsoluteError',
            'mae',
            'MAE',
        ),
        word='mean absolute error',
        tasks=(REGRESSION,),
    ),
    Loss(
        'huber',
        'squared error below 1, absolute error above (Huber 1964)',
        f'{_LOSSES}:huber',
        aliases=('Huber',),
        word='Huber',
        tasks=(REGRESSION,),
    ),
    _keras_loss(
        'log_cosh',
        'log(cosh(error)): near half the squared error if it is small, near the'
        ' absolute error if it is large',
        (REGRESSION,),
        'LogCosh',
    ),
    _keras_loss(
        'mean_absolute_percentage_error',
        'absolute error in percent of the target',
        (REGRESSION,),
        'MeanAbsolutePercentageError',
        'mape',
        'MAPE',
    ),
    _keras_loss(
        'mean_squared_logarithmic_error',
        'squared difference of log(1 + target) and log(1 + output), for numbers'
        ' from 0',
        (REGRESSION,),
        'MeanSquaredLogarithmicError',
        'msle',
        'MSLE',
    ),
    _keras_loss(
        'poisson',
        'output - target * log(output), for counts and positive outputs',
        (REGRESSION,),
        'Poisson',
    ),
    _keras_loss(
        'cosine_similarity',
        '- the cosine of the angle between the targets and the outputs of a'
        ' sample',
        (REGRESSION,),
        'CosineSimilarity',
        min_outputs=2,
    ),
    _keras_loss(
        'hinge',
        'max(1 - y * logit, 0), where y is 1 for yes and -1 for no',
        YES_OR_NO,
        'Hinge',
        takes_logits=True,
    ),
    _keras_loss(
        'squared_hinge',
        'square of the hinge loss',
        YES_OR_NO,
        'SquaredHinge',
        takes_logits=True,
    ),
    _keras_loss(
        'binary_focal_crossentropy',
        "Keras's focal loss of yes and no",
        YES_OR_NO,
        'BinaryFocalCrossentropy',
        takes_logits=True,
        from_logits=True,
    ),
    _keras_loss(
        'categorical_hinge',
        'max(1 + the largest logit of the other classes - the logit of the'
        ' right one, 0)',
        EXCLUSIVE,
        'CategoricalHinge',
        takes_logits=True,
    ),
    _keras_loss(
        'categorical_focal_crossentropy',
        "Keras's focal loss of the classes: a quarter of `focal`",
        EXCLUSIVE,
        'CategoricalFocalCrossentropy',
        takes_logits=True,
        from_logits=True,
    ),
    _keras_loss(
        'kl_divergence',
        'Kullback-Leibler divergence of the probabilities from the right'
        ' classes',
        EXCLUSIVE,
        'KLDivergence',
        'kld',
        'KLD',
    ),
    of_object=_loss_of_object,
)

_METRICS = 'tff_bn.models.metrics'


def _metric(
    kind: columns.Kind,
    description: str,
    tasks: Collection[str],
    *aliases: str,
) -> Metric:
  return Metric(
      kind.name,
      description,
      f'{_METRICS}:{kind.name}',
      aliases=aliases,
      kind=kind,
      tasks=tuple(tasks),
  )


def _keras_metric(
    kind: columns.Kind,
    description: str,
    for_tasks: Collection[str],
    class_name: str,
    *aliases: str,
    takes_logits: bool = False,
    min_outputs: int = 1,
    **arguments: Any,
) -> Metric:
  """Returns the entry of a metric of Keras."""
  return Metric(
      kind.name,
      description,
      _of_keras(
          'metrics', class_name, takes_logits, name=kind.name, **arguments
      ),
      aliases=(class_name, *aliases),
      kind=kind,
      tasks=tuple(for_tasks),
      min_outputs=min_outputs,
  )


def _lower(name: str, word: str = '') -> columns.Kind:
  """Returns the kind of a metric of which less is better."""
  word = word or name.replace('_', ' ')
  return columns.number(name, word, higher_is_better=False)


def _correlation(name: str) -> columns.Kind:
  """Returns the kind of a metric from -1 to 1."""
  word = name.replace('_', ' ')
  return columns.number(name, word, higher_is_better=True, largest=1)


METRICS: Parts[Metric] = Parts(
    _metric(
        columns.share('accuracy', 'accuracy'),
        'share of right answers: classes, labels or pixels',
        (*EXCLUSIVE, *YES_OR_NO),
        'Accuracy',
        'binary_accuracy',
        'BinaryAccuracy',
        'categorical_accuracy',
        'CategoricalAccuracy',
        'sparse_categorical_accuracy',
        'SparseCategoricalAccuracy',
    ),
    _metric(
        columns.share('top_5_accuracy', 'top-5 accuracy'),
        'share of samples whose class is among the 5 most likely ones',
        (CLASSIFICATION,),
        'top_k_categorical_accuracy',
        'TopKCategoricalAccuracy',
        'sparse_top_k_categorical_accuracy',
        'SparseTopKCategoricalAccuracy',
    ),
    _metric(
        columns.number('auc', 'AUC', higher_is_better=True, largest=1),
        'area under the ROC curve; with several labels, their mean',
        YES_OR_NO,
        'AUC',
    ),
    _metric(
        columns.share('f1', 'F1'),
        'F1 score; with several classes or labels, their mean',
        (CLASSIFICATION, *YES_OR_NO),
        'f1_score',
        'F1Score',
        'f_beta_score',
        'FBetaScore',
    ),
    _metric(
        columns.share('precision', 'precision'),
        'share of predicted samples of a class that have it; with several'
        ' classes or labels, their mean',
        (CLASSIFICATION, *YES_OR_NO),
        'Precision',
    ),
    _metric(
        columns.share('recall', 'recall'),
        'share of the samples of a class that are found; with several classes'
        ' or labels, their mean',
        (CLASSIFICATION, *YES_OR_NO),
        'Recall',
    ),
    _metric(
        columns.number('mae', 'MAE', higher_is_better=False),
        'mean absolute error',
        (REGRESSION,),
        'mean_absolute_error',
        'MeanAbsoluteError',
        'MAE',
    ),
    _metric(
        columns.number('rmse', 'RMSE', higher_is_better=False),
        'root of the mean squared error',
        (REGRESSION,),
        'root_mean_squared_error',
        'RootMeanSquaredError',
    ),
    _metric(
        columns.number('r2', 'R²', higher_is_better=True, largest=1),
        'share of the variance of the targets that the model explains; with'
        ' several targets, their mean',
        (REGRESSION,),
        'r2_score',
        'R2Score',
    ),
    _metric(
        columns.share('dice', 'Dice'),
        'overlap of predicted and true pixels, twice the common ones over the'
        ' sum of both: mean over the classes other than 0 that occur',
        (SEGMENTATION,),
    ),
    _metric(
        columns.share('mean_iou', 'mean IoU'),
        'intersection over union: mean over the classes that occur',
        (SEGMENTATION,),
        'mean_io_u',
        'MeanIoU',
        'one_hot_mean_io_u',
        'OneHotMeanIoU',
    ),
    _keras_metric(
        _lower('mean_squared_error'),
        'mean of the squared errors',
        (REGRESSION,),
        'MeanSquaredError',
        'mse',
        'MSE',
    ),
    _keras_metric(
        _lower('mean_absolute_percentage_error'),
        'mean absolute error in percent of the target',
        (REGRESSION,),
        'MeanAbsolutePercentageError',
        'mape',
        'MAPE',
    ),
    _keras_metric(
        _lower('mean_squared_logarithmic_error'),
        'mean squared difference of log(1 + target) and log(1 + output)',
        (REGRESSION,),
        'MeanSquaredLogarithmicError',
        'msle',
        'MSLE',
    ),
    _keras_metric(
        _lower('log_cosh_error', 'log-cosh error'),
        'mean of log(cosh(error))',
        (REGRESSION,),
        'LogCoshError',
    ),
    _keras_metric(
        _lower('poisson', 'Poisson loss'),
        'mean of output - target * log(output)',
        (REGRESSION,),
        'Poisson',
    ),
    _keras_metric(
        _correlation('cosine_similarity'),
        'mean cosine of the angle between the targets and the outputs of a'
        ' sample',
        (REGRESSION,),
        'CosineSimilarity',
        min_outputs=2,
    ),
    _keras_metric(
        _correlation('pearson_correlation'),
        'mean Pearson correlation of the targets and the outputs of a sample',
        (REGRESSION,),
        'PearsonCorrelation',
        min_outputs=2,
    ),
    _keras_metric(
        _correlation('concordance_correlation'),
        'mean concordance correlation of the targets and the outputs of a'
        ' sample',
        (REGRESSION,),
        'ConcordanceCorrelation',
        min_outputs=2,
    ),
    _keras_metric(
        _lower('categorical_crossentropy', 'cross-entropy'),
        'cross-entropy of the classes',
        EXCLUSIVE,
        'CategoricalCrossentropy',
        'sparse_categorical_crossentropy',
        'SparseCategoricalCrossentropy',
        takes_logits=True,
        from_logits=True,
    ),
    _keras_metric(
        _lower('kl_divergence', 'KL divergence'),
        'Kullback-Leibler divergence of the probabilities from the right'
        ' classes',
        EXCLUSIVE,
        'KLDivergence',
    ),
    _keras_metric(
        _lower('categorical_hinge'),
        'mean of the loss of this name',
        EXCLUSIVE,
        'CategoricalHinge',
        takes_logits=True,
    ),
    _keras_metric(
        _lower('binary_crossentropy', 'binary cross-entropy'),
        'cross-entropy of yes and no',
        YES_OR_NO,
        'BinaryCrossentropy',
        'bce',
        'BCE',
        takes_logits=True,
        from_logits=True,
    ),
    _keras_metric(
        _lower('hinge'),
        'mean of the loss of this name',
        YES_OR_NO,
        'Hinge',
        takes_logits=True,
    ),
    _keras_metric(
        _lower('squared_hinge'),
        'mean of the loss of this name',
        YES_OR_NO,
        'SquaredHinge',
        takes_logits=True,
    ),
    _keras_metric(
        columns.share('binary_iou', 'binary IoU'),
        'intersection over union: mean over yes and no',
        YES_OR_NO,
        'BinaryIoU',
        'binary_io_u',
    ),
    *(
        _keras_metric(
            columns.number(name, name.replace('_', ' '), name[:4] == 'true'),
            description,
            YES_OR_NO,
            class_name,
        )
        for name, class_name, description in (
            ('true_positives', 'TruePositives', 'number of yes that are found'),
            ('true_negatives', 'TrueNegatives', 'number of no that are found'),
            (
                'false_positives',
                'FalsePositives',
                'number of no that are predicted as yes',
            ),
            (
                'false_negatives',
                'FalseNegatives',
                'number of yes that are predicted as no',
            ),
        )
    ),
    of_object=_metric_of_object,
)


def kind(name: str) -> columns.Kind:
  """Returns what the numbers of a metric are, given the name of its result.

  Of a user's metric, nothing is known but the name.
  """
  found = METRICS[name].kind if name in METRICS else None
  return found or columns.number(name, name)


def loss_of(task: str, loss: Optional[str]) -> Loss:
  """Returns the loss of a run; None: the default of the task."""
  return LOSSES[loss or TASKS[task].loss]


def metrics_of(task: str, metrics: Optional[Sequence[str]]) -> list[Metric]:
  """Returns the metrics of a run; None: the defaults of the task."""
  return [METRICS[name] for name in metrics or TASKS[task].metrics]


def check(
    task: str,
    loss: Optional[str] = None,
    metrics: Optional[Sequence[str]] = None,
    class_weight: Optional[str] = None,
    num_outputs: Optional[int] = None,
) -> None:
  """Checks that a loss, metrics and class weights are possible for a task.

  Args:
    task: A key of `TASKS`.
    loss: The name of a loss, or None.
    metrics: The names of metrics, or None.
    class_weight: A key of `CLASS_WEIGHTS`, or None.
    num_outputs: The number of outputs, for each pixel of a segmentation; None:
      not known yet.

  Raises:
    ValueError: If one of them is for other tasks, or for more outputs.
  """
  for option, parts, names in (
      (LOSS, LOSSES, () if loss is None else (loss,)),
      (METRICS_OPTION, METRICS, metrics or ()),
  ):
    for name in names:
      if task not in parts[name].tasks:
        possible = [n for n, part in parts.items() if task in part.tasks]
        raise ValueError(
            f'{option.name}={name} is for {_enumerate(parts[name].tasks)}, but'
            f' the task is {task}; use {_enumerate(possible, "or")}.'
        )
      needed = parts[name].min_outputs
      if num_outputs is not None and num_outputs < needed:
        raise ValueError(
            f'{option.name}={name} needs at least {needed} outputs, but the'
            f' model has {num_outputs}.'
        )
  if class_weight not in (None, NO_WEIGHTS) and not has_sample_classes(task):
    raise ValueError(
        f'{CLASS_WEIGHT.name}={class_weight} needs one class for each sample,'
        f' but the task is {task}.'
    )


def _enumerate(names: Sequence[str], word: str = 'and') -> str:
  *others, last = names
  return f'{", ".join(others)} {word} {last}' if others else last


def task_of_labels(kind: str, shape: Sequence[int]) -> str:
  """Finds the task from the labels' dtype and shape.

  Args:
    kind: The kind of the dtype, as `numpy.dtype.kind`: 'b', 'i', 'u' or 'f'.
    shape: The shape of one sample's label.

  Returns:
    A key of `TASKS`.

  Raises:
    ValueError: If no task has such labels. The message continues a sentence
      whose subject is the labels.
  """
  is_float = kind == 'f'
  match len(shape):
    case 0:
      is_single = True
    case 1:
      is_single = tuple(shape) == (1,)
    case 2 | 3 if not is_float and tuple(shape[2:]) in ((), (1,)):
      return SEGMENTATION
    case _:
      raise ValueError(
          f'have the dtype kind {kind!r} and the shape {tuple(shape)} for each'
          ' sample, which no task has.'
      )
  if is_float:
    return REGRESSION
  if not is_single:
    return MULTILABEL
  return BINARY if kind == 'b' else CLASSIFICATION


def has_sample_classes(task: str) -> bool:
  """Whether each sample has exactly one class."""
  return TASKS[task].has_classes


def output_shape(
    task: str, input_shape: Sequence[int], num_outputs: int
) -> tuple[int, ...]:
  """Returns the shape of a model's output for one sample.

  Args:
    task: A key of `TASKS`.
    input_shape: The shape of a sample.
    num_outputs: The number of outputs, for each pixel of a segmentation.
  """
  pixels = tuple(input_shape[:2]) if task == SEGMENTATION else ()
  return (*pixels, num_outputs)


TASK = Option(
    'task',
    value_types.Choice(TASKS),
    f'What the model learns from the labels:\n{listing(TASKS)}',
    default_text="found from the labels' dtype and shape",
)
LOSS = Option(
    'loss',
    PartName(LOSSES, YOUR_FUNCTION),
    f"The loss, also by a name of Keras's:\n{listing(LOSSES)}or"
    f' {YOUR_FUNCTION}; the function is called'
    ' without arguments and returns a keras.losses.Loss',
    default_text=', '.join(
        f'{task.loss} for {task.name}' for task in TASKS.values()
    ),
)
METRICS_OPTION = Option(
    'metrics',
    value_types.List(PartName(METRICS, YOUR_FUNCTION)),
    "Comma-separated metrics, also by names of Keras's. The first one is the"
    ' main one, which tables, plots and pages show first:\n'
    f'{listing(METRICS)}or {YOUR_FUNCTION}; the function is called without'
    ' arguments and returns a keras.metrics.Metric whose variables are sums'
    ' over the examples',
    default_text='; '.join(
        f'{",".join(task.metrics)} for {task.name}' for task in TASKS.values()
    ),
)
NO_WEIGHTS = 'none'
BALANCED = 'balanced'
CLASS_WEIGHTS = {
    NO_WEIGHTS: 'all samples count alike',
    BALANCED: (
        'each class counts alike: a sample of a class has the weight n / (k *'
        ' c), given n samples of all clients that train, k classes and c'
        ' samples of this class'
    ),
}
CLASS_WEIGHT = Option(
    'class_weight',
    value_types.Choice(CLASS_WEIGHTS),
    'The weights of the samples in the training loss. For classification and'
    f' binary:\n{listing(CLASS_WEIGHTS)}',
    default_text=NO_WEIGHTS,
)
OPTIONS = (LOSS, METRICS_OPTION, CLASS_WEIGHT)
