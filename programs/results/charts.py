"""Charts of runs: Vega-Lite specifications, which pages and PNG files share.

A specification is a dictionary that JSON can express, see
https://vega.github.io/vega-lite. A page draws it in the browser, and `save`
draws it as a PNG file.
"""

from collections.abc import Mapping, Sequence
import itertools
import json
import pathlib
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from tff_bn.catalog import columns
from tff_bn.catalog import tasks
from tff_bn.common import files
from tff_bn.programs.results import curve_points
from tff_bn.programs.results import line_styles
from tff_bn.programs.results import report

if TYPE_CHECKING:
  from tff_bn.data import federated

Spec = dict[str, Any]
# The colors and dashes of lines by their names.
Styles = Mapping[str, Mapping[str, Any]]
# More rows of the label distribution can't be read.
MAX_CLIENTS = 200
_MAX_NAMED_CLASSES = 40
# Runs share a linear axis if the totals that they have sent differ by at most
# this factor. Then every curve has a fifth of the axis.
_MAX_LINEAR_RATIO = 5
# Longer lines have no circles. A single point has no line.
_MAX_CIRCLES = 10
# The lengths of dashes and gaps in pixels, for styles of Matplotlib.
_DASHES: Mapping[str, Sequence[float]] = {
    '-': [],
    '--': [7, 4],
    '-.': [7, 3, 2, 3],
    ':': [2, 3],
}
# The colors of the light and the dark scheme by their use.
COLORS = {
    'light': {
        'background': '#ffffff',
        'text': '#1c1d21',
        'muted': '#5c5f66',
        'line': '#d9dbe0',
        'panel': '#f5f6f8',
        'link': '#0b5cad',
        'ramp': ['#f2f5fa', '#08519c'],
    },
    'dark': {
        'background': '#17181c',
        'text': '#e8e9ec',
        'muted': '#a4a8b1',
        'line': '#3a3d45',
        'panel': '#22242a',
        'link': '#7db7f5',
        'ramp': ['#22242a', '#7db7f5'],
    },
}
# Characters in a pixel of a title.
_CHARACTERS = 1 / 7
# Dots of PNG files in a pixel.
_SCALE = 2


class Axis(NamedTuple):
  """A horizontal axis of curves.

  `name` is a key of `curve_points.values`, `short` is shown in the choice of
  the page, and `step` is the smallest distance of ticks.
  """

  name: str
  title: str
  short: str
  step: int = 1


ROUND = Axis(curve_points.ROUND, 'Round', 'rounds')
COSTS = tuple(
    Axis(c.name, c.axis_title, c.name, step=int(not c.kind.digits))
    for c in columns.costs()
)
SECONDS = Axis(
    curve_points.SECONDS, 'Seconds (mean time of a round × rounds)', 'seconds'
)
AXES = (ROUND, *COSTS, SECONDS)


def config(scheme: str) -> Spec:
  """Returns the look of all charts in the light or dark scheme."""
  found = COLORS[scheme]
  text, muted = found['text'], found['muted']
  labels = dict(labelColor=text, labelFontSize=12)
  titles = dict(titleColor=text, titleFontSize=12, titleFontWeight='normal')
  return dict(
      background='transparent',
      font='system-ui, sans-serif',
      view=dict(stroke=None),
      axis=dict(
          domainColor=muted,
          tickColor=muted,
          gridColor=found['line'],
          gridOpacity=0.6,
          **labels,
          **titles,
      ),
      legend=dict(
          labelLimit=400,
          symbolSize=500,
          symbolStrokeWidth=2,
          symbolType='stroke',
          **labels,
          **titles,
      ),
      header=dict(labelLimit=0, **labels),
      title=dict(color=text, fontSize=13, fontWeight='normal'),
      range=dict(heatmap=found['ramp'], ramp=found['ramp']),
      boxplot=dict(median=dict(color=text), rule=dict(color=muted)),
  )


def styles(
    groups: Mapping[str, Sequence[report.Run]],
) -> dict[str, dict[str, Any]]:
  """Returns the color and the dashes of each line by its name, given its runs.

  The runs of an algorithm have its color. If there is no other algorithm,
  colors tell apart what else differs.
  """
  algorithms = {
      name: runs[0].labels.get(report.ALGORITHM, '')
      for name, runs in groups.items()
  }
  names = dict.fromkeys(algorithms.values())
  if len(names) == 1:
    found = line_styles.choose(list(algorithms), algorithms)
  else:
    found = {}
    of_algorithms = line_styles.choose(list(names))
    dashes = line_styles.DASHES
    numbers = {name: itertools.count() for name in names}
    for name, algorithm in algorithms.items():
      style = of_algorithms[algorithm]
      number = dashes.index(style['linestyle']) + next(numbers[algorithm])
      found[name] = {**style, 'linestyle': dashes[number % len(dashes)]}
  return {
      name: dict(color=style['color'], dash=_DASHES[style['linestyle']])
      for name, style in found.items()
  }


def curves(
    runs: Sequence[report.Run],
    column: columns.Column,
    axis: Axis,
    lines: Styles,
) -> Spec:
  """Draws the curves of a column: lines with bands of one standard deviation.

  The chart has no data yet; they are `curve_points.values`. Against
  communication, a line that sends nothing is horizontal, at its last value.
  """
  totals = curve_points.totals(runs, axis.name) if axis in COSTS else [1.0]
  # A common linear axis would hide some of the runs.
  is_logarithmic = max(totals) > _MAX_LINEAR_RATIO * min(totals)
  num_points = len({row['round'] for run in runs for row in run.rows})
  deviation = curve_points.deviation_of(column.name)
  line_colors = {name: style['color'] for name, style in lines.items()}
  transform = [
      _calculate('color', f'{json.dumps(line_colors)}[datum.name]'),
      _calculate('x', f"datum['{axis.name}']"),
      _calculate('mean', f"datum['{column.name}']"),
      _calculate('deviation', f"datum['{deviation}']"),
      dict(filter='isValid(datum.x) && isValid(datum.mean)'),
  ]
  if axis in COSTS:
    transform += _with_horizontal_lines(is_logarithmic)
  log: Spec = dict(type='log', nice=False)
  y_scale: Spec = dict(zero=False)
  low, high = 'datum.mean - datum.deviation', 'datum.mean + datum.deviation'
  smallest, largest = column.kind.range
  if smallest is not None:
    low = f'max({smallest}, {low})'
  if largest is not None:
    high = f'min({largest}, {high})'
  # A loss can be negative, such as the cosine similarity.
  is_positive = not any(
      row.get(column.name, 0) < 0 for run in runs for row in run.rows
  )
  if column.kind.is_logarithmic and is_positive:
    transform += [dict(filter='datum.mean > 0'), _join(smallest='min mean')]
    low, y_scale = f'max({low}, datum.smallest / 2)', log
  transform += [
      _calculate('low', low),
      _calculate('high', high),
  ]

  def y(field: str) -> Spec:
    ticks = dict(format=column.kind.axis_format, tickCount=6, labelOverlap=True)
    return _number(field, column.kind.title, scale=y_scale, axis=ticks)

  x = _number(
      'x',
      axis.title,
      scale=log if is_logarithmic else dict(nice=False, zero=False),
      axis=dict(
          tickCount=5,
          tickMinStep=axis.step,
          format='~s',
          labelOverlap=True,
          grid=False,
      ),
  )
  # Touched or pointed at, a point tells its numbers.
  tooltip = [
      _name('name', 'Line'),
      _number('round', 'Round'),
      _number('x', axis.title, format='.6~g'),
      _number('mean', 'Mean', format='.4~f'),
      _number('deviation', 'Deviation', format='.4~f'),
  ]
  # Only the lines are in the legend: a fill without a scale has none.
  fill = dict(field='color', type='nominal', scale=None)
  size, opacity = (30, 1) if num_points <= _MAX_CIRCLES else (60, 0)
  return dict(
      height=280,
      transform=transform,
      encoding=dict(x=x, detail=dict(field='name')),
      layer=[
          _layer(
              'area',
              dict(opacity=0.18),
              y=y('low'),
              y2=dict(field='high'),
              fill=fill,
          ),
          _layer(
              'line',
              y=y('mean'),
              stroke=_style('color', lines),
              strokeDash=_style('dash', lines),
          ),
          _layer(
              'circle',
              dict(size=size, opacity=opacity),
              y=y('mean'),
              fill=fill,
              tooltip=tooltip,
          ),
      ],
  )


def _with_horizontal_lines(is_logarithmic: bool) -> list[Spec]:
  """Returns transforms that give what sends nothing its last value.

  A logarithmic axis has no place for the untrained model.
  """
  sends = f'datum.total > 0 && datum.x {">" if is_logarithmic else ">="} 0'
  is_last = 'datum.total == 0 && datum.round == datum.last'
  return [
      _join(['name'], total='max x', last='max round'),
      dict(filter=f'{sends} || {is_last}'),
      _calculate('sent', 'datum.total > 0 ? datum.x : null'),
      _join(left='min sent', right='max sent'),
      _calculate(
          'x', 'datum.total > 0 ? [datum.x] : [datum.left, datum.right]'
      ),
      dict(flatten=['x']),
  ]


def _calculate(name: str, expression: str) -> Spec:
  return {'calculate': expression, 'as': name}


def _join(groupby: Sequence[str] = (), **aggregates: str) -> Spec:
  """Returns a transform that adds aggregates, such as `lowest='min value'`."""
  parts = {name: text.split() for name, text in aggregates.items()}
  added = [
      {'op': operation, 'field': field, 'as': name}
      for name, (operation, field) in parts.items()
  ]
  # Panels fail without `groupby`.
  return dict(joinaggregate=added, groupby=list(groupby))


def _number(field: str, title: Optional[str], **more: Any) -> Spec:
  return dict(field=field, type='quantitative', title=title, **more)


def _name(field: str, title: Optional[str], **more: Any) -> Spec:
  return dict(field=field, type='nominal', title=title, **more)


def _layer(mark: str, look: Mapping[str, Any] = {}, **encoding: Any) -> Spec:
  return dict(mark=dict(type=mark, **look), encoding=encoding)


def _style(attribute: str, lines: Styles) -> Spec:
  """Encodes the color or the dashes of lines."""
  values = [style[attribute] for style in lines.values()]
  return _name('name', None, scale=dict(domain=list(lines), range=values))


def client_metrics(lines: Styles, kind: columns.Kind) -> Spec:
  """Draws a metric of the clients of each line, and its quartiles.

  Its data have the numbers in a field with the name of the metric.
  """
  ticks = dict(format='%' if kind.is_share else '~g', tickCount=5)
  number_format = '.2%' if kind.is_share else '.4~f'
  tooltip = [
      _name('name', 'Line'),
      _name('client', 'Client'),
      _name('seed', 'Seed'),
      _number(kind.name, kind.title, format=number_format),
  ]
  box = dict(extent='min-max', size=16, box=dict(opacity=0.4), ticks=False)
  return dict(
      height=30 * len(lines),
      encoding=dict(
          x=_number(kind.name, kind.title, axis=ticks, scale=dict(zero=False)),
          y=_name('name', None, sort=list(lines), axis=dict(labelLimit=150)),
          color=_style('color', lines),
      ),
      layer=[
          _layer('boxplot', box),
          _layer('circle', dict(size=26, opacity=0.7), tooltip=tooltip),
      ],
  )


def label_values(data: 'federated.FederatedData') -> list[Spec]:
  """Returns the data of `labels`: counts of the first `MAX_CLIENTS` clients."""
  names = column_names(data)
  return [
      {
          'client': client_id,
          'label': names[label] if names else label,
          'count': count,
      }
      for client_id, row in zip(
          data.client_ids[:MAX_CLIENTS], data.label_distribution().tolist()
      )
      for label, count in enumerate(row)
  ]


def column_names(data: 'federated.FederatedData') -> Sequence[str]:
  """Returns the names of the counted labels; none for classes with numbers."""
  if data.task == tasks.REGRESSION:
    return data.label_names
  return data.class_names


def labels(
    num_clients: int,
    num_names: int,
    task: tasks.Task,
    has_numbers: bool = False,
) -> Spec:
  """Draws `label_values`: the counts of each client's labels.

  Args:
    num_clients: The number of clients.
    num_names: The number of classes with names. Up to 40 names are all shown.
    task: The task, which says what is counted.
    has_numbers: Whether the cells have numbers.
  """
  shown = min(num_clients, MAX_CLIENTS)
  title, counted = task.column.capitalize(), task.counted.capitalize()
  class_labels = dict(
      labelAngle=-90 if num_names else 0,
      labelLimit=150,
      labelOverlap=not 0 < num_names <= _MAX_NAMED_CLASSES,
  )
  client_labels = dict(labelOverlap=True, labelLimit=120)
  is_dark = 'datum.count > 0.6 * datum.highest'
  tooltip = [
      _name('client', 'Client'),
      _name('label', title),
      _number('count', counted),
  ]
  color = _number(
      'count',
      counted,
      scale=dict(domainMin=0),
      legend=dict(orient='bottom', gradientLength=160),
  )
  return dict(
      height=shown * min(22, max(3, 600 / shown)),
      transform=[_join(highest='max count')],
      encoding=dict(
          x=_name('label', title, sort=None, axis=class_labels),
          y=_name('client', 'Client', sort=None, axis=client_labels),
      ),
      layer=[
          _layer('rect', color=color, tooltip=tooltip),
          *([_numbers('count', 'd', is_dark, '')] if has_numbers else []),
      ],
  )


def heat_map(
    row_title: str, column_title: str, label_angle: int, kind: columns.Kind
) -> Spec:
  """Draws a heat map with numbers in its cells.

  Its data have a `row`, a `column` and a `value` of a kind, times its factor,
  which may be None. Better cells are lighter. `label_angle` turns the labels of
  the columns.
  """
  scale: Spec = dict(scheme='viridis', zero=False)
  # The better half of the colors is light.
  middle = '(datum.lowest + datum.highest) / 2'
  is_dark = f'datum.value < {middle}'
  if not kind.higher_is_better:
    scale['reverse'] = True
    is_dark = f'datum.value > {middle}'
  digits = kind.digits
  column_labels = dict(labelAngle=label_angle, labelLimit=200)
  return dict(
      width=dict(step=46),
      height=dict(step=28),
      transform=[_join(lowest='min value', highest='max value')],
      # In the order of the data: the first row is at the top.
      encoding=dict(
          x=_name('column', column_title, sort=None, axis=column_labels),
          y=_name('row', row_title, sort=None, axis=dict(labelLimit=300)),
      ),
      layer=[
          _layer('rect', color=_number('value', None, scale=scale)),
          _numbers('value', f'.{digits}f', is_dark, f'{0:.{digits}f}'),
      ],
  )


def _numbers(field: str, number_format: str, is_dark: str, zero: str) -> Spec:
  """Returns a layer with numbers, a text for zero, and a dash for None.

  `number_format` is d3's; `is_dark` is an expression on cells.
  """
  number = f"format(datum.{field}, '{number_format}')"
  text = f"datum.{field} ? {number} : datum.{field} === 0 ? '{zero}' : '–'"
  test = f'isValid(datum.{field}) && {is_dark}'
  return _layer(
      'text',
      text=dict(value=dict(expr=text)),
      color=dict(condition=dict(test=test, value='white'), value='black'),
  )


def panels(
    chart: Spec, values: Sequence[Mapping[str, Any]], num_columns: int
) -> Spec:
  """Draws a chart for each `panel` in its data, the values."""
  titles = list(dict.fromkeys(value['panel'] for value in values))
  header = dict(labelExpr="split(datum.label, '\\n')")
  facet = _name('panel', None, sort=titles, header=header)
  inner = {key: part for key, part in chart.items() if key != 'transform'}
  return dict(
      facet=facet,
      columns=num_columns,
      transform=chart['transform'],
      spec=inner,
      data=dict(values=values),
  )


def wrapped(text: str, width: int) -> str:
  """Breaks text between words after at most `width` characters.

  A longer word has its own line.
  """
  return textwrap.fill(
      text, width, break_on_hyphens=False, break_long_words=False
  )


def titled(chart: Spec, width: float, *lines: str) -> Spec:
  """Gives a chart a title, broken after its width in pixels.

  Empty lines of the title are left out.
  """
  shown = [part for line in lines for part in line.splitlines() if part]
  broken = [wrapped(p, max(20, int(width * _CHARACTERS))) for p in shown]
  return {**chart, 'title': {'text': '\n'.join(broken).split('\n')}}


def save(folder: pathlib.Path, charts: Mapping[str, Spec]) -> None:
  """Saves each chart as NAME.png; a file appears only when it is complete."""
  # Imported late: it is large.
  import vl_convert

  folder.mkdir(exist_ok=True)
  look = {**config('light'), 'background': 'white'}
  for name, chart in charts.items():
    png = vl_convert.vegalite_to_png(
        {**chart, 'padding': 10, 'config': look}, scale=_SCALE
    )
    files.replace(folder / f'{name}.png', png)
