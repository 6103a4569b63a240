"""Tests of the loader of experiment files."""

import re

import pytest

from tff_bn.papers import compare_with_experiments
from tff_bn.papers.experiments import experiment_files
from tff_bn.papers.experiments import experiment_plan
from tff_bn.papers.experiments import paper_form
from tff_bn.programs import compare
from tff_bn.programs.cli import command_line
from tff_bn.programs.plan import axes

_TOML = """
title = "New, table 1: accuracy"
place = "section 5"
finding = "Good is better than bad."

[flags]
dataset = "tfds:cifar10"
rounds = 3000
local_epochs = 5
seeds = "0,1,2"

[axes.method]
"Bad" = { algorithm = "fedavg" }
"Good" = { algorithm = "fedtan_ii", sync_rounds = 2000 }

[axes.data]
"i.i.d." = { split = "iid" }
"skewed" = { split = "classes", classes_per_client = 2 }

[show]
kind = "table"
rows = "method"
columns = "data"
value = "test_accuracy"

[[analyses]]
name = "weight_divergence"
runs = "method"
flags = { num_rounds = 10 }

[digits]
finding = "Good is better than bad on digits, too."
without = ["local_epochs"]
[digits.flags]
dataset = "digits"
rounds = 20
model = "mlp3"
[digits.axes.method]
"Good" = { algorithm = "fedtan_ii", sync_rounds = 5 }
"""
_CSV = """method,data,value,deviation
Bad,i.i.d.,80.5,0.5
Good,i.i.d.,81.25,
"""


@pytest.fixture(name='write')
def fixture_write(tmp_path, monkeypatch):
  """Writes an experiment."""
  monkeypatch.setattr(experiment_files, 'FOLDER', tmp_path)

  def write(toml=_TOML, csv=None, name='new/table_1'):
    path = tmp_path / f'{name}.toml'
    path.parent.mkdir(exist_ok=True)
    path.write_text(toml, encoding='utf-8')
    if csv is not None:
      path.with_suffix('.csv').write_text(csv, encoding='utf-8')

  return write


def _plan(scale, *arguments, swept=()):
  flags = command_line.parse(compare_with_experiments.define_flags, arguments)
  return experiment_plan.plan(flags, 'new/table_1', scale, swept)


def test_paper_scale(write):
  write(csv=_CSV)

  experiment = experiment_files.load('new/table_1')

  assert experiment.title == 'New, table 1: accuracy'
  assert experiment.finding == 'Good is better than bad.'
  assert experiment.found is None
  assert experiment.flags == {
      'dataset': 'tfds:cifar10',
      'rounds': '3000',
      'local_epochs': '5',
      'seeds': '0,1,2',
  }
  assert [axis.name for axis in experiment.axes] == ['method', 'data']
  assert experiment.axes[0].points[1] == axes.Point(
      'Good', {'algorithm': 'fedtan_ii', 'sync_rounds': '2000'}
  )
  assert experiment.shown == paper_form.Show(
      'table', rows=('method',), columns=('data',), value=('test_accuracy',)
  )
  assert experiment.analyses == (
      experiment_files.Analysis(
          'weight_divergence', 'method', {'num_rounds': '10'}
      ),
  )
  assert experiment.paper == (
      paper_form.PaperNumber(
          {'method': 'Bad', 'data': 'i.i.d.'}, 'test_accuracy', 80.5, 0.5
      ),
      paper_form.PaperNumber(
          {'method': 'Good', 'data': 'i.i.d.'}, 'test_accuracy', 81.25, None
      ),
  )


def test_digits_scale_replaces_what_it_names(write):
  write(csv=_CSV)

  experiment = experiment_files.load('new/table_1', 'digits')

  assert experiment.finding == 'Good is better than bad.'
  assert experiment.found == 'Good is better than bad on digits, too.'
  assert experiment.flags == {
      'dataset': 'digits',
      'rounds': '20',
      'model': 'mlp3',
      'seeds': '0,1,2',
  }
  assert [len(axis.points) for axis in experiment.axes] == [1, 2]
  assert experiment.axes[0].points[0].flags['sync_rounds'] == '5'
  assert experiment.analyses[0].flags == {'num_rounds': '10'}
  assert len(experiment.paper) == 2


def test_fashion_scale_differs_from_the_papers_scale(write):
  write(_TOML + """
[fashion]
agrees = "in part"
finding = "Good is as good as bad."
core_hours = 1.5
[fashion.flags]
dataset = "fashion_mnist"
""")

  experiment = experiment_files.load('new/table_1', 'fashion')

  assert experiment.found == 'Good is as good as bad.'
  assert experiment.agrees == 'in part'
  assert experiment.core_hours == 1.5
  assert experiment.flags == {
      'dataset': 'fashion_mnist',
      'rounds': '3000',
      'local_epochs': '5',
      'seeds': '0,1,2',
  }
  paper = experiment_files.load('new/table_1')
  assert experiment.axes == paper.axes
  assert paper.core_hours is None
  assert experiment_files.scales('new/table_1') == [
      *('paper', 'fashion', 'digits', 'smoke')
  ]


def test_digits_can_change_the_form_and_the_analyses(write):
  write(_TOML + """
[digits.show]
value = "test_loss"
[[digits.analyses]]
name = "matching"
runs = "data"
""")

  experiment = experiment_files.load('new/table_1', 'digits')

  assert experiment.shown.value == ('test_loss',)
  assert experiment.shown.rows == ('method',)
  assert [a.name for a in experiment.analyses] == ['matching']


def test_names_are_in_the_order_of_their_numbers(write):
  for name in ('b/table_1', 'a/figure_10', 'a/figure_9', 'a/figure_9_left'):
    write(name=name)

  assert experiment_files.names() == [
      'a/figure_9',
      'a/figure_9_left',
      'a/figure_10',
      'b/table_1',
  ]


def test_a_figure_stands_for_its_parts(write):
  for name in ('a/figure_1_b', 'a/figure_1_a', 'a/figure_2', 'a/figure_2_c'):
    write(name=name)
  write(name='a/figure_10_a')

  assert experiment_files.parts('a/figure_1') == [
      'a/figure_1_a',
      'a/figure_1_b',
  ]
  assert experiment_files.parts('a/figure_2') == ['a/figure_2']
  assert experiment_files.parts('a/figure_1_b') == ['a/figure_1_b']
  # A part of a name is not enough.
  assert experiment_files.parts('a/figure') == ['a/figure']
  assert experiment_files.parts('a/figure_3') == ['a/figure_3']


@pytest.mark.parametrize(
    ('arguments', 'folders'),
    [
        (
            ['--output_dir=out'],
            ['out/table_1_a', 'out/table_1_b'],
        ),
        (
            [],
            [
                'runs/experiments/new/table_1_a-digits',
                'runs/experiments/new/table_1_b-digits',
            ],
        ),
    ],
)
def test_all_parts_run_in_their_own_folders(
    write, monkeypatch, arguments, folders
):
  for name in ('new/table_1_a', 'new/table_1_b'):
    write(name=name)
  listed = []
  monkeypatch.setattr(
      compare,
      '_list',
      lambda planned, folder, folders: listed.append(str(folder)),
  )

  assert not compare_with_experiments.run(
      ['--experiment=new/table_1', '--scale=digits', '--list', *arguments]
  )
  assert listed == folders


def test_a_mistake_in_the_last_part_is_found_first(write, monkeypatch, capsys):
  write(name='new/table_1_a')
  write(_TOML.replace('2000', '"many"'), name='new/table_1_b')
  monkeypatch.setattr(compare, 'run_planned', lambda _: pytest.fail('Started.'))

  assert compare_with_experiments.run(['--experiment=new/table_1']) == 2
  assert 'many' in capsys.readouterr().err


def test_a_wrong_name_gets_a_suggestion(write):
  write()

  with pytest.raises(ValueError, match='Did you mean new/table_1'):
    experiment_files.load('new/tabel_1')


def test_a_missing_scale_is_an_error_that_says_which_there_are(write):
  write(_TOML.partition('[digits]')[0])

  with pytest.raises(ValueError, match='the scales paper, smoke only'):
    experiment_files.load('new/table_1', 'digits')


@pytest.mark.parametrize(
    'old, new, message',
    [
        ('title =', 'titel =', 'titel is not understood.*Did you mean title'),
        ('title = "New, table 1: accuracy"', '', 'title must be given'),
        (
            'finding = "Good is better than bad."',
            '',
            'finding must be given: the place in the paper and its finding',
        ),
        ('place = "section 5"', '', 'place must be given: the place in'),
        (
            'without = ["local_epochs"]',
            'without = ["local_epochs"]\nagrees = "yess"',
            "digits.agrees is 'yess', but must be one of yes, within",
        ),
        (
            'finding = "Good is better than bad on digits, too."',
            'agrees = "yes"',
            "digits.agrees needs the paper's finding and digits.finding",
        ),
        (
            'columns = "data"',
            'columns = "data"\nprinted = { dat = ["x"] }',
            "printed names 'dat', which is no axis that it shows",
        ),
        (
            'columns = "data"',
            'columns = "data"\nprinted = { data = ["skewed"] }',
            "printed.data names 'skewed', which has runs",
        ),
        (
            'columns = "data"',
            'columns = "data"\ncompared = "metod"',
            "compared names 'metod', which is no axis that it shows",
        ),
        *(
            (
                'title =',
                f'core_hours = {hours}\ntitle =',
                rf'core_hours is {re.escape(shown)}, but must be more than 0',
            )
            for hours, shown in (
                ('0', '0'),
                ('nan', 'nan'),
                ('true', 'True'),
                ('"1.5"', "'1.5'"),
            )
        ),
        ('rounds = 3000', 'round = 3', 'flags.round is no flag.*mean rounds'),
        ('rounds = 3000', 'seed = 3', 'flags.seed is no flag'),
        ('rounds = 3000', 'rounds = [3]', 'flags.rounds must be a text'),
        (
            'algorithm = "fedavg"',
            'algorithms = "fedavg"',
            'axes.method.Bad.algorithms is no flag.*Did you mean algorithm',
        ),
        ('algorithm = "fedavg"', '', 'axes.method.Bad sets no algorithm'),
        (
            '"Bad" = { algorithm = "fedavg" }\n"Good" = { algorithm ='
            ' "fedtan_ii", sync_rounds = 2000 }',
            '"Bad" = { gamma = 0 }',
            'axes sets no algorithm',
        ),
        ('"table"', '"tabel"', "show.kind is 'tabel'.*Did you mean table"),
        (
            'rows = "method"',
            'rows = "metod"',
            "names 'metod', which is no axis",
        ),
        ('rows = "method"', 'rows = ["method", "data"]', "names 'data' twice"),
        ('columns = "data"', '', "shows no axis 'data', which has 2 points"),
        (
            'columns = "data"',
            'columns = "data"\nwith_mean = "client"',
            "with_mean names 'client', which is no axis that it shows",
        ),
        ('columns = "data"', 'lines = "data"', 'show.lines is not understood'),
        (
            'value = "test_accuracy"',
            '',
            "value must be given for kind = 'table'",
        ),
        ('rows = "method"', 'rows = 3', 'show.rows must be a text or a list'),
        ('runs = "method"', 'runs = "data2"', r"analyses\[0\].runs is 'data2'"),
        (
            '["local_epochs"]',
            '["local_step"]',
            "digits.without names 'local_st",
        ),
        ('[digits.axes.method]', '[digits.axes.m]', 'digits.axes.m replaces'),
        ('[digits.flags]', '[digits.flag]', 'digits.flag is not understood'),
        ('[axes.data]', '[axes.client]', 'client is no possible name'),
        ('[axes.data]', '[axes.data', 'is no TOML file'),
    ],
)
def test_mistakes_in_the_file(write, old, new, message):
  assert _TOML.count(old) >= 1
  write(_TOML.replace(old, new))

  with pytest.raises(ValueError, match=f'(?s)table_1.toml: .*{message}'):
    experiment_files.load('new/table_1')


_DATA = """[axes.data]
"i.i.d." = { split = "iid" }
"skewed" = { split = "classes", classes_per_client = 2 }
"""


def test_axis_of_another_experiment(write):
  write()
  write(
      _TOML.replace(_DATA, '[axes]\ndata = "new/table_1"\n'), name='new/table_2'
  )
  first, second = map(experiment_files.load, ('new/table_1', 'new/table_2'))
  assert second.axis('data') == first.axis('data')


@pytest.mark.parametrize(
    'other, message',
    [
        ('new/tabel_3', 'axes.data names .*tabel_3.*not known.*mean new/table'),
        ('new/table_1', 'axes.data must be a table, because new/table_1 has'),
    ],
)
def test_axis_of_an_experiment_without_it(write, other, message):
  write(_TOML.replace(_DATA, '[axes]\ndata = "new/table_3"\n'))
  write(_TOML.replace(_DATA, f'[axes]\ndata = "{other}"\n'), name='new/table_3')
  with pytest.raises(ValueError, match=f'table_3.toml: .*{message}'):
    experiment_files.load('new/table_3')


_OWN_FLAGS = """[flags]
dataset = "tfds:cifar10"
rounds = 3000
local_epochs = 5
seeds = "0,1,2"
"""


def test_flags_of_another_experiment(write):
  write()
  reference, own = 'flags_of = "new/table_1"\n', '[flags]\nrounds = 7\n'
  write(_TOML.replace(_OWN_FLAGS, reference), name='new/table_2')
  write(_TOML.replace(_OWN_FLAGS, reference + own), name='new/table_3')
  first, same, changed = (
      experiment_files.load(f'new/table_{number}').flags for number in (1, 2, 3)
  )
  assert same == first
  assert changed == {**first, 'rounds': '7'}


@pytest.mark.parametrize(
    'other, message',
    [
        ('new/tabel_3', 'flags_of names .*tabel_3.*not known.*mean new/table'),
        ('new/table_1', 'flags_of must name .* own; new/table_1 has flags_of'),
    ],
)
def test_flags_of_an_experiment_without_them(write, other, message):
  write(_TOML.replace(_OWN_FLAGS, 'flags_of = "new/table_3"\n'))
  write(
      _TOML.replace(_OWN_FLAGS, f'flags_of = "{other}"\n'), name='new/table_3'
  )
  with pytest.raises(ValueError, match=f'table_3.toml: .*{message}'):
    experiment_files.load('new/table_3')


@pytest.mark.parametrize(
    'csv, message',
    [
        ('method,value\nBad,1\n', 'has the columns method, value, but must'),
        ('method,data,value\nBda,i.i.d.,1\n', "line 2: method is 'Bda'"),
        ('method,data,value\nBad,i.i.d.,x\n', "line 2: 'x' is no number"),
        (
            'method,data,value\nBad,i.i.d.,1\nBad,i.i.d.,2\n',
            'line 3.*is there twice',
        ),
        ('method,data,value\n', 'has no numbers'),
    ],
)
def test_mistakes_in_the_numbers(write, csv, message):
  write(csv=csv)

  with pytest.raises(ValueError, match=f'table_1.csv: .*{message}'):
    experiment_files.load('new/table_1')


def test_several_values_need_a_column(write):
  toml = _TOML.replace('"test_accuracy"', '["test_accuracy", "train_loss"]')
  csv = 'method,data,column,value\nBad,i.i.d.,train_loss,0.5\n'

  write(toml, csv)

  (number,) = experiment_files.load('new/table_1').paper

  assert (number.column, number.value) == ('train_loss', 0.5)
  assert number.labels == {'method': 'Bad', 'data': 'i.i.d.'}


def test_a_measurement_has_no_runs(write):
  write(
      'title = "T"\nplace = "P"\nfinding = "F"\n[[analyses]]\n'
      'name = "kept_share"\n'
      'flags = { repeats = 3 }\n'
  )

  plans = experiment_plan.check_all('new/table_1')

  assert plans['paper'].comparison is None
  assert plans['smoke'].experiment.analyses[0].flags['repeats'] == '2'


def test_plan_has_the_product_of_the_axes_and_the_seeds(write):
  write()

  plan = _plan('paper')

  runs = plan.comparison.runs
  assert len(runs) == 2 * 2 * 3
  assert runs[3].labels == {'method': 'Good', 'data': 'skewed'}
  assert runs[3].settings.rounds == 3000
  assert runs[3].settings.sync_rounds == 2000
  assert runs[3].settings.classes_per_client == 2
  assert runs[3].settings.local_epochs == 5
  assert plan.flags.average_last == 5


def test_flags_of_the_command_overrule_the_experiment(write):
  write()

  plan = _plan('paper', '--rounds=2500', '--seeds=7', '--local_steps=1')

  assert len(plan.comparison.runs) == 4
  settings = plan.comparison.runs[0].settings
  assert (settings.rounds, settings.seed) == (2500, 7)
  assert (settings.local_steps, settings.local_epochs) == (1, None)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--algorithms=fbn'], '--algorithms=fbn is impossible.*axis method'),
        (['--split=gamma'], '--split=gamma is impossible.*i.i.d., skewed'),
        (['--moon_weight=1'], '--experiment=new/table_1: --moon_weight=1.0'),
    ],
)
def test_flags_of_the_command_that_are_refused(write, arguments, message):
  write()

  with pytest.raises(ValueError, match=message):
    _plan('paper', *arguments)


def test_a_swept_flag_is_one_more_axis(write):
  swept = axes.Axis(
      'batch_size',
      (
          axes.Point('8', {'batch_size': '8'}),
          axes.Point('9', {'batch_size': '9'}),
      ),
  )

  write(csv=_CSV)

  plan = _plan('digits', swept=[swept])

  assert len(plan.comparison.runs) == 2 * 2 * 3
  assert {run.settings.batch_size for run in plan.comparison.runs} == {8, 9}
  assert plan.experiment.shown.rows == ('batch_size', 'method')
  assert plan.experiment.paper == ()


@pytest.mark.parametrize(
    'flag, message',
    [
        (
            '--task=regression',
            '--task=regression is impossible: experiments show the accuracy',
        ),
        ('--metrics=f1', '--metrics=f1 is impossible: .* add accuracy'),
    ],
)
def test_results_of_another_task_are_refused(write, flag, message):
  write()

  with pytest.raises(ValueError, match=f'--experiment=new/table_1: {message}'):
    _plan('digits', flag)


@pytest.mark.parametrize(
    'flag, message',
    [
        (
            '--task=classification',
            ' is impossible: .* Dice if their task is seg',
        ),
        ('--metrics=mean_iou', ' is impossible: .*; add dice'),
    ],
)
def test_an_experiment_of_another_task(flag, message):
  name = 'tff_bn/segmentation'
  flags = command_line.parse(compare_with_experiments.define_flags, [flag])
  with pytest.raises(ValueError, match=f'--experiment={name}: {flag}{message}'):
    experiment_plan.plan(flags, name, experiment_files.PAPER)


def test_labels_must_be_classes(write):
  """So data of another task is refused before any training."""
  write()

  plan = _plan('digits', '--dataset=diabetes', '--metrics=f1,accuracy')

  assert {run.settings.task for run in plan.comparison.runs} == {
      'classification'
  }


@pytest.mark.parametrize('name', ['split', 'method'])
def test_a_sweep_of_what_the_experiment_varies_is_refused(write, name):
  swept = axes.Axis(name, (axes.Point('iid', {'split': 'iid'}),))

  write()

  with pytest.raises(ValueError, match='is impossible with --experiment'):
    _plan('paper', swept=[swept])


@pytest.mark.parametrize(
    'old, new, message',
    [
        ('"weight_divergence"', '"weight"', "name is 'weight'; there is"),
        (
            'num_rounds = 10',
            'num_round = 1',
            'has no flag num_round.*num_rounds',
        ),
        ('num_rounds = 10', 'run = "x"', 'has no flag run that'),
        ('runs = "method"', '', 'weight_divergence needs runs'),
        (
            'num_rounds = 10',
            'num_rounds = 0',
            'weight_divergence: --num_rounds=0: must',
        ),
        ('"weight_divergence"', '"normalization_error"', 'takes no runs'),
    ],
)
def test_mistakes_in_analyses(write, old, new, message):
  toml = _TOML.replace(old, new)
  if 'takes' in message:
    toml = toml.replace('num_rounds = 10', 'rounds = 10')

  write(toml)

  with pytest.raises(ValueError, match=message):
    experiment_plan.check_all('new/table_1')


def test_an_algorithm_for_all_runs(write):
  toml = _TOML.replace('[flags]', '[flags]\nalgorithm = "fedavg"')
  toml = re.sub(r'"(Bad|Good)" = .*', r'"\1" = { pan = "add" }', toml)
  toml = toml.partition('[digits]')[0].replace(
      '"Bad" = { pan = "add" }', '"Bad" = { pan = "off" }'
  )

  write(toml)

  plan = _plan('paper')

  assert {r.settings.algorithm for r in plan.comparison.runs} == {'fedavg'}
  assert {r.settings.pan for r in plan.comparison.runs} == {'off', 'add'}
  with pytest.raises(ValueError, match='whose algorithm is fedavg'):
    _plan('paper', '--algorithms=fbn')
