"""The accuracy of trained models after permutations of their hidden units.

Figure 4 of Li et al., Federated Learning with Position-Aware Neurons, CVPR
2022.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from matplotlib import figure
import numpy as np

from tff_bn.papers import figures
from tff_bn.papers.run_analyses import analyzed_run
from tff_bn.papers.run_analyses import run_tables
from tff_bn.position_aware import permutation
from tff_bn.programs.results import line_styles


class Accuracy(NamedTuple):
  """A model after permutations with P_sf, the mean over permutations.

  Attributes:
    run: The run's name.
    seed: The run's seed.
    shuffle_probability: P_sf.
    error: The shuffle error on the test examples.
    accuracy: The accuracy on the test examples.
  """

  run: str
  seed: int
  shuffle_probability: float
  error: float
  accuracy: float


def measure(
    run: analyzed_run.AnalyzedRun,
    shuffle_probabilities: Sequence[float],
    *,
    num_examples: int,
    repeats: int,
    seed: int,
) -> Iterator[Accuracy]:
  """Permutes the units of a run's model, and leaves its encodings in place.

  Args:
    run: The run.
    shuffle_probabilities: The values of P_sf.
    num_examples: The maximum number of test examples.
    repeats: The number of permutations for each value.
    seed: The random seed of the examples and the permutations.

  Yields:
    The result for each value of P_sf, in ascending order.
  """
  x, y = run.test_examples(num_examples, seed)
  before = permutation.outputs(run.keras_model, x)
  for probability in sorted(shuffle_probabilities):
    errors, accuracies = [], []
    for repeat in range(repeats):
      model = permutation.shuffle_units(
          run.keras_model, probability, seed + repeat
      )
      after = permutation.outputs(model, x)
      errors.append(permutation.output_change(before, after))
      accuracies.append(np.mean(np.argmax(after, axis=1) == y))
    yield Accuracy(
        *(run.name, run.seed, probability),
        *(float(np.mean(errors)), float(np.mean(accuracies))),
    )


def markdown(accuracies: Sequence[Accuracy]) -> str:
  """Makes a table with a row for each P_sf and a column for each run."""
  return run_tables.means_markdown(
      ['P_sf'],
      [
          ((f'{a.shuffle_probability:g}',), a.run, 100 * a.accuracy)
          for a in accuracies
      ],
      '.1f',
      [
          'Accuracy on test examples in % after the hidden units are permuted,'
          ' with the encodings with which the model was trained.'
      ],
  )


def accuracy_figure(
    accuracies: Sequence[Accuracy],
    algorithms: Optional[Mapping[str, str]] = None,
) -> figure.Figure:
  """Draws the accuracy of each run against P_sf; lines are means over seeds.

  Args:
    accuracies: The accuracies.
    algorithms: The algorithm of each run, which gives its color.

  Returns:
    The figure.
  """
  drawing, ((axes,),) = run_tables.panels(1, 1, width=5, height=3.6)
  names = list(dict.fromkeys(a.run for a in accuracies))
  styles = line_styles.choose(names, algorithms)
  for name in names:
    points = [
        (a.shuffle_probability, 100 * a.accuracy)
        for a in accuracies
        if a.run == name
    ]
    run_tables.draw_means(axes, points, label=name, **styles[name])
  axes.set_xlabel('Probability that a unit is swapped')
  axes.set_ylabel('Accuracy, %')
  axes.legend(frameon=False, fontsize='small')
  figures.tidy(axes)
  figures.add_title(drawing, 'Accuracy after permuting hidden units')
  return drawing
