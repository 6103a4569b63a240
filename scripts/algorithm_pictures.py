"""Draws what the server and the clients do and send in a round.

A picture has two columns, the server and the clients, and time runs downwards.
"""

from collections.abc import Mapping, Sequence
import textwrap
from typing import NamedTuple, Union
from xml.sax import saxutils


class Down(NamedTuple):
  """A message from the server to all clients."""

  text: str


class Up(NamedTuple):
  """A message from each client to the server."""

  text: str


class AtServer(NamedTuple):
  """What the server computes."""

  text: str


class AtClients(NamedTuple):
  """What each client computes."""

  text: str


class Repeat(NamedTuple):
  """Steps that are repeated, for example for each layer."""

  text: str
  steps: Sequence[Union[Down, Up, AtServer, AtClients]]


Step = Union[Down, Up, AtServer, AtClients, Repeat]

_MODEL = 'kernels, scale, shift, moving mean and variance'
_BATCH = 'Local steps. BN normalizes with the statistics of the batch.'
_AVERAGE = 'Takes the mean of everything'
_LOCAL_STEPS = 'More local steps with the statistics of the own batch'

_WITH_FIXED_STATISTICS = (
    Down(_MODEL),
    AtClients(
        'Local steps. BN normalizes with the moving mean and variance,'
        ' which no longer change.'
    ),
    Up(_MODEL),
    AtServer(_AVERAGE + '. The statistics stay as they are.'),
)

# Page of docs/algorithms -> the steps of a round.
PICTURES: Mapping[str, Sequence[Step]] = {
    'centralized': (
        AtServer(
            'One model, one step on the union of the batches of all clients.'
            ' BN normalizes with the statistics of the union.'
        ),
        AtClients('Nothing: the data are in one place.'),
    ),
    'single': (
        AtServer('Nothing'),
        AtClients(
            'Local steps. Each client has its own model and sends nothing.'
        ),
    ),
    'fedavg': (
        Down(_MODEL),
        AtClients(_BATCH),
        Up(_MODEL),
        AtServer(_AVERAGE),
    ),
    'fedbn': (
        Down('kernels'),
        AtClients(
            _BATCH
            + ' Scale, shift, moving mean and variance stay here from round to'
            ' round.'
        ),
        Up('kernels'),
        AtServer('Takes the mean of the kernels'),
    ),
    'silobn': (
        Down('kernels, scale, shift'),
        AtClients(
            _BATCH + ' Moving mean and variance stay here from round to round.'
        ),
        Up('kernels, scale, shift'),
        AtServer('Takes the mean of what was sent'),
    ),
    'local_affine': (
        Down('kernels, moving mean and variance'),
        AtClients(_BATCH + ' Scale and shift stay here from round to round.'),
        Up('kernels, moving mean and variance'),
        AtServer('Takes the mean of what was sent'),
    ),
    'fedstein': (
        Down('kernels, moving mean and variance'),
        AtClients(_BATCH + ' Scale and shift stay here from round to round.'),
        Up('kernels, moving mean and variance'),
        AtServer(
            'Takes the mean of what was sent, and shrinks the moving mean and'
            ' variance of each layer towards 0 (James-Stein)'
        ),
    ),
    'fedap': (
        Down('kernels: the mean, and the average for this client'),
        AtClients(
            _BATCH
            + ' Scale, shift, moving mean and variance stay here from round to'
            ' round.'
        ),
        Up('kernels, moving mean and deviation'),
        AtServer(
            'Takes the mean of the kernels, and an average for each client:'
            ' half its own, and more of clients with similar statistics'
        ),
    ),
    'fedper': (
        Down('everything outside of the head'),
        AtClients(_BATCH + ' The head stays here from round to round.'),
        Up('everything outside of the head'),
        AtServer('Takes the mean of what was sent'),
    ),
    'fedrep': (
        Down('everything outside of the head'),
        AtClients('Local steps that change only the head, which stays here.'),
        AtClients('Local steps that change only everything else'),
        Up('everything outside of the head'),
        AtServer('Takes the mean of what was sent'),
    ),
    'lg_fedavg': (
        Down('head'),
        AtClients(_BATCH + ' All other layers stay here from round to round.'),
        Up('head'),
        AtServer('Takes the mean of the heads'),
    ),
    'fedbabu': (
        Down('everything outside of the head'),
        AtClients(_BATCH + ' The head never changes.'),
        Up('everything outside of the head'),
        AtServer('Takes the mean of what was sent'),
    ),
    'ditto': (
        Down(_MODEL),
        AtClients(_BATCH),
        AtClients(
            'The same steps for the personal model, which stays here. Its loss'
            ' has a term that grows with the distance to the received model.'
        ),
        Up(_MODEL),
        AtServer(_AVERAGE),
    ),
    'fedtan': (
        Down(_MODEL),
        Repeat(
            'Forward pass: for each BN layer, from first to last',
            (
                Up('mean of the batch'),
                Down('mean over all clients'),
                Up('variance about this mean'),
                Down('variance over all clients'),
            ),
        ),
        Repeat(
            'Backward pass: for each BN layer, from last to first',
            (
                Up('gradients of mean and variance'),
                Down('their means over all clients'),
            ),
        ),
        AtClients('One step with this gradient. ' + _LOCAL_STEPS + '.'),
        Up(_MODEL),
        AtServer(_AVERAGE),
    ),
    'fedtan_ii': (
        AtServer('The first --sync_rounds rounds are rounds of FedTAN. Then:'),
        *_WITH_FIXED_STATISTICS,
    ),
    'fixbn': (
        AtServer('The first --fixbn_rounds rounds are rounds of FedAvg. Then:'),
        *_WITH_FIXED_STATISTICS,
    ),
    'fbn': (
        Down(_MODEL),
        AtClients(
            'Local steps. BN normalizes with the moving mean and variance that'
            ' were received; they are constants. The statistics of the batches'
            ' are collected.'
        ),
        Up('kernels, scale, shift, statistics of the batches'),
        AtServer(
            'Takes the mean of the weights. Corrects the statistics for the'
            ' differences between clients, and moves its own.'
        ),
    ),
    'fbn_backward': (
        Down('the model, and two averages of gradients for each BN layer'),
        AtClients(
            'One local step. The averages replace the two means that the'
            ' backward pass of BN has.'
        ),
        Up('kernels, scale, shift, statistics of the batch'),
        AtServer(
            'As in FBN. Reads the gradients of scale and shift off the change'
            ' of scale and shift, and moves its averages.'
        ),
    ),
    'hbn': (
        Down(_MODEL),
        AtClients(
            'A pass without gradients: statistics of the batches. Then local'
            ' steps. BN normalizes with a mixture of received and batch'
            ' statistics. The share of the batch is trained and stays here.'
        ),
        Up('kernels, scale, shift, counts, means, variances'),
        AtServer(
            'Takes the mean of the weights, pools the statistics, and moves'
            ' its own by --hbn_statistics_rate.'
        ),
    ),
    'dsgd': (
        Down(_MODEL),
        AtClients(
            'One gradient. With --dsgd_momentum: its average over the rounds,'
            ' which the client keeps.'
        ),
        Up('gradient or momentum, moving mean and variance'),
        AtServer(
            'One step of the optimizer, whose state lasts from round to round'
        ),
    ),
    'fedprox': (
        Down(_MODEL),
        AtClients(
            'Local steps. The loss has a term that grows with the distance to'
            ' the received model.'
        ),
        Up(_MODEL),
        AtServer(_AVERAGE),
    ),
    'scaffold': (
        Down(_MODEL),
        AtClients(
            'Local steps. Each gradient is corrected by the difference of two'
            ' control variates. The client keeps its own.'
        ),
        Up(_MODEL),
        AtServer(
            _AVERAGE + '. Control variates are sent only if they cannot be'
            ' derived from the models.'
        ),
    ),
    'bn_scaffold': (
        Down(_MODEL + '; control variates'),
        AtClients(
            'Local steps. BN corrects the mean and the deviation of the batch'
            ' by the difference of two control variates, and each gradient is'
            ' corrected in the same way. The client keeps its own.'
        ),
        Up(_MODEL + '; changes of the control variates'),
        AtServer(_AVERAGE + '. Adds the mean changes to its control variates.'),
    ),
    'moon': (
        Down(_MODEL),
        AtClients(
            'Local steps. The loss pulls the features towards those of the'
            ' received model and away from those of the previous local model,'
            ' which the client keeps.'
        ),
        Up(_MODEL),
        AtServer(_AVERAGE),
    ),
    'greg': (
        Down(_MODEL),
        AtClients(
            'Local steps. The loss has a term for the difference between two'
            ' outputs: with the statistics of the batch, and with the received'
            ' moving statistics.'
        ),
        Up(_MODEL),
        AtServer(_AVERAGE),
    ),
    'fedbs': (
        Down(_MODEL),
        AtClients('Local steps; the loss of the round.'),
        Up(_MODEL + '; loss'),
        AtServer(
            'Takes a mean with the losses as weights. Once the losses are'
            ' similar: FedProx.'
        ),
    ),
    'fednova': (
        Down(_MODEL),
        AtClients(_BATCH + ' Divides the change of the weights by its steps.'),
        Up('change per step, number of steps, moving mean and variance'),
        AtServer(
            'Moves by the mean change per step times the mean number of'
            ' steps. Takes the mean of the statistics.'
        ),
    ),
    'feddyn': (
        Down(_MODEL),
        AtClients(
            'Local steps. The loss has a linear term, from the changes of the'
            ' model in earlier rounds, and a term that grows with the distance'
            ' to the received model. The client keeps the sum of its changes.'
        ),
        Up(_MODEL),
        AtServer(
            _AVERAGE + ', and adds the changes of the earlier rounds to the'
            ' mean of the weights.'
        ),
    ),
    'fedrdn': (
        AtServer(
            'Before the first round, it gets the mean and the deviation of the'
            " channels of each client's images, and sends all of them to all"
            ' clients. Then:'
        ),
        Down(_MODEL),
        AtClients(
            'Local steps. Each image is scaled with the mean and deviation of a'
            ' client that is drawn at random.'
        ),
        Up(_MODEL),
        AtServer(_AVERAGE),
    ),
}

_WIDTH = 720
# The middle of the columns, and the half width of their boxes.
_SERVER, _CLIENTS, _HALF = 140, 580, 125
_LINE_HEIGHT = 17
_CHARACTERS = 34  # In a line of a box.
_STYLE = """\
text { font: 13px sans-serif; fill: #1f2933; text-anchor: middle; }
.head { font-weight: bold; font-size: 15px; }
.server { fill: #e3effb; stroke: #3b78b8; }
.clients { fill: #e6f4ea; stroke: #38844c; }
.line { stroke: #9aa5b1; stroke-dasharray: 3 4; }
.message { stroke: #1f2933; stroke-width: 1.5; marker-end: url(#tip); }
.repeat { fill: none; stroke: #b06a00; stroke-dasharray: 6 3; }
.repeated { fill: #b06a00; }"""


def draw(steps: Sequence[Step]) -> str:
  """Draws a round as an SVG picture.

  Args:
    steps: The steps in their order.

  Returns:
    The text of the SVG file.
  """
  parts: list[str] = []
  bottom = _draw_steps(steps, 60, parts)
  lines = [
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}"'
      f' height="{bottom + 10}" viewBox="0 0 {_WIDTH} {bottom + 10}">',
      f'<style>\n{_STYLE}\n</style>',
      '<defs><marker id="tip" viewBox="0 0 10 10" refX="10" refY="5"'
      ' markerWidth="8" markerHeight="8" orient="auto">'
      '<path d="M0 0 L10 5 L0 10 z" fill="#1f2933"/></marker></defs>',
      f'<rect width="{_WIDTH}" height="{bottom + 10}" rx="6" fill="#ffffff"/>',
  ]
  for x, name in ((_SERVER, 'Server'), (_CLIENTS, 'Each client')):
    lines.append(f'<text class="head" x="{x}" y="28">{name}</text>')
    lines.append(
        f'<line class="line" x1="{x}" y1="38" x2="{x}" y2="{bottom}"/>'
    )
  return '\n'.join([*lines, *parts, '</svg>', ''])


def _draw_steps(steps: Sequence[Step], y: int, parts: list[str]) -> int:
  """Draws steps from a height on; returns the height below them."""
  for step in steps:
    match step:
      case Repeat(text, repeated):
        below = _draw_steps(repeated, y + 30, parts)
        parts.append(
            f'<rect class="repeat" x="8" y="{y}" width="{_WIDTH - 16}"'
            f' height="{below - y}" rx="6"/>'
        )
        parts.append(_text(_WIDTH // 2, y + 18, text, 'repeated'))
        y = below + 12
      case Down(text) | Up(text):
        start, end = _SERVER, _CLIENTS
        if isinstance(step, Up):
          start, end = end, start
        parts.append(_text(_WIDTH // 2, y + 12, text))
        parts.append(
            f'<line class="message" x1="{start}" y1="{y + 20}" x2="{end}"'
            f' y2="{y + 20}"/>'
        )
        y += 34
      case AtServer(text) | AtClients(text):
        at_server = isinstance(step, AtServer)
        x = _SERVER if at_server else _CLIENTS
        lines = textwrap.wrap(text, _CHARACTERS)
        height = _LINE_HEIGHT * len(lines) + 12
        parts.append(
            f'<rect class="{"server" if at_server else "clients"}"'
            f' x="{x - _HALF}" y="{y}" width="{2 * _HALF}" height="{height}"'
            ' rx="4"/>'
        )
        for number, line in enumerate(lines, 1):
          parts.append(_text(x, y + 2 + _LINE_HEIGHT * number, line))
        y += height + 12
  return y


def _text(x: int, y: int, text: str, style: str = '') -> str:
  attribute = f' class="{style}"' if style else ''
  return f'<text{attribute} x="{x}" y="{y}">{saxutils.escape(text)}</text>'
