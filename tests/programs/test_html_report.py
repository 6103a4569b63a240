"""Tests of `report.html`, in a browser where there is one."""

import html.parser
import math
import os
import pathlib
import re
import shutil
import urllib.parse

import csv_rows
import matplotlib.image
import numpy as np
import pytest

from tff_bn.programs import html_report
from tff_bn.programs import report
from tff_bn.programs import run_timing

_SEEDS = (0, 1, 2)
_ROUNDS = (0, 10, 20, 30)
_AVERAGED = 2
# Exchanges and megabytes of a round.
_COSTS = {'centralized': (0, 0.0), 'fedtan': (23, 3.5)}
_ALGORITHMS = (
    *('centralized', 'fedavg', 'fedbn', 'silobn', 'fedtan'),
    *('fedtan_forward_only', 'fedtan_ii', 'fbn', 'fixbn'),
)
_EVIL = '<script>window.evil = 1</script>"\''
_CHROMIUM = shutil.which('chromium')
_CHROMIUM_FLAGS = (
    '--no-sandbox',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-gpu',
    '--disable-sync',
)


class _Data:
  """Clients of one class each."""

  client_ids = [f'client_{number}' for number in range(9)] + [_EVIL]

  def label_distribution(self):
    return np.diag(np.arange(1, 11))


def _write_run(folder, algorithm, seed):
  """Writes the files of a run that the page reads."""
  folder.mkdir(parents=True)
  rng = np.random.default_rng([seed, _ALGORITHMS.index(algorithm)])
  exchanges, megabytes = _COSTS.get(algorithm, (1, 0.25))
  lines = [
      'round,train_loss,test_loss,test_accuracy,client_test_accuracy,'
      'exchanges,megabytes'
  ]
  for number in _ROUNDS:
    train_loss = f'{rng.uniform(0.1, 2):.7g}' if number else ''
    values = [f'{value:.7g}' for value in rng.uniform(0.1, 0.9, 3)]
    costs = f'{exchanges * number},{megabytes * number}'
    lines.append(f'{number},{train_loss},{",".join(values)},{costs}')
  (folder / 'metrics.csv').write_text('\n'.join(lines) + '\n')
  (folder / 'flags.txt').write_text(f'--algorithm={algorithm}\n')
  (folder / 'client_metrics.csv').write_text(
      'round,client,loss,accuracy,num_examples\n'
      + ''.join(
          f'30,client_{client},0.5,{accuracy:.7g},36\n'
          for client, accuracy in enumerate(rng.uniform(0.2, 1, 9))
      )
  )
  run_timing.write(folder, 15.0, 30)


def _page(folders, results, runs, varied=(report.ALGORITHM,)):
  return html_report.Page(
      title='Comparison',
      program='tff-bn-compare',
      flags={
          'algorithms': ','.join(_ALGORITHMS),
          'model': _EVIL,
          'sweep': 'gamma=0,1\nrounds=1,2',
      },
      runs=runs,
      folders=folders,
      results=results,
      num_averaged=_AVERAGED,
      varied=varied,
      data=_Data(),
      data_title='digits, 10 clients',
      labels_of='fedavg, seed 0',
  )


@pytest.fixture(scope='module', autouse=True)
def known_versions():
  """Finding the versions imports TensorFlow."""
  names = ('tff_bn', 'tensorflow-federated', 'tensorflow', 'keras', 'python')
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(
        html_report.versions,
        'versions',
        lambda: {name: f'{number}.5' for number, name in enumerate(names)},
    )
    yield


@pytest.fixture(scope='module')
def comparison(tmp_path_factory):
  """The folder of a comparison of nine algorithms with three seeds."""
  folder = tmp_path_factory.mktemp('<b>a & "b"')
  runs, folders = [], []
  for seed in _SEEDS:
    for algorithm in _ALGORITHMS:
      run = folder / 'runs' / f'{algorithm}-seed{seed}'
      _write_run(run, algorithm, seed)
      folders.append(run)
      runs.append(
          report.Run({'algorithm': algorithm}, seed, report.read_rows(run))
      )
  results = [report.result(run, _AVERAGED) for run in runs]
  (folder / 'results.csv').write_text(report.results_csv(results))
  html_report.write(folder, _page(folders, results, runs))
  return folder


class _Parser(html.parser.HTMLParser):
  """Collects tables, links and what a page would load."""

  def __init__(self):
    super().__init__()
    self.tables = {}
    self.links = []
    self.loaded = []
    self.preformatted = []
    self._table = None
    self._path = []

  def handle_starttag(self, tag, attrs):
    attributes = dict(attrs)
    if tag == 'table':
      self._table = self.tables.setdefault(attributes.get('id'), [])
    elif tag == 'tr':
      self._table.append([])
    elif tag in ('td', 'th'):
      self._table[-1].append('')
    elif tag == 'a':
      self.links.append(attributes['href'])
    elif tag == 'pre':
      self.preformatted.append('')
    if tag == 'link' or 'src' in attributes:
      self.loaded.append(attributes.get('src', 'link'))
    self._path.append(tag)

  def handle_endtag(self, tag):
    while self._path and self._path.pop() != tag:
      pass

  def handle_data(self, data):
    if 'pre' in self._path:
      self.preformatted[-1] += data
    elif {'td', 'th'} & set(self._path):
      self._table[-1][-1] += data


def _parse(folder):
  parser = _Parser()
  parser.feed((folder / 'report.html').read_text(encoding='utf-8'))
  return parser


def _expected_table(folder):
  """Computes the table from results.csv."""
  results = csv_rows.read(folder / 'results.csv')
  table = []
  for algorithm in _ALGORITHMS:
    rows = [row for row in results if row['algorithm'] == algorithm]
    assert len(rows) == len(_SEEDS)
    line = [algorithm]
    for column, factor, digits in (
        ('test_accuracy', 100, 1),
        ('client_test_accuracy', 100, 1),
        ('test_loss', 1, 2),
        ('train_loss', 1, 2),
    ):
      values = [factor * float(row[column]) for row in rows]
      line.append(
          f'{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}'
      )
    line += [rows[0]['rounds'], rows[0]['exchanges']]
    table.append([*line, f'{float(rows[0]["megabytes"]):.2f}'])
  return table


def test_table_has_the_numbers_of_results_csv(comparison):
  _, *rows = _parse(comparison).tables['results']
  assert rows == _expected_table(comparison)


def test_each_run_has_its_numbers_and_files(comparison):
  page = _parse(comparison)
  titles, *rows = page.tables['runs']
  results = csv_rows.read(comparison / 'results.csv')
  assert len(rows) == len(results) == 27
  for row, result in zip(rows, results):
    cells = dict(zip(titles, row, strict=True))
    assert cells['Algorithm'] == result['algorithm']
    assert cells['Seed'] == result['seed']
    for title, column, factor, digits in (
        ('Accuracy, %', 'test_accuracy', 100, 1),
        ('Client accuracy, %', 'client_test_accuracy', 100, 1),
        ('Loss', 'test_loss', 1, 2),
    ):
      assert cells[title] == f'{factor * float(result[column]):.{digits}f}'
    assert cells['Seconds per round'] == '0.5'
    assert cells['Files'].split() == ['folder', 'metrics', 'flags']
  assert len(page.links) == 3 * 27
  for link in page.links:
    assert (comparison / urllib.parse.unquote(link)).exists()


def test_page_is_small_and_loads_nothing(comparison):
  assert (comparison / 'report.html').stat().st_size < 2e6
  assert not _parse(comparison).loaded


def test_texts_of_users_are_escaped(comparison):
  text = (comparison / 'report.html').read_text(encoding='utf-8')
  assert '<script>window' not in text
  assert '&lt;script&gt;window' in text


def test_command_repeats_the_flags(comparison):
  short, full = _parse(comparison).preformatted
  assert short == (
      'tff-bn-compare --flagfile=flags.txt --output_dir=NEW_FOLDER'
  )
  assert '    --sweep=gamma=0,1 \\\n    --sweep=rounds=1,2 \\\n' in full
  assert full.endswith('--output_dir=NEW_FOLDER')


def test_a_run_without_costs_and_time(tmp_path):
  runs = [report.Run({'algorithm': 'a'}, 0, [dict(round=1, test_accuracy=0.5)])]
  results = [report.result(run, 1) for run in runs]
  html_report.write(tmp_path, _page([tmp_path], results, runs))
  page = _parse(tmp_path)
  assert page.tables['results'][1] == ['a', '50.0', '1']
  assert page.tables['runs'][1][-1] == '–'


def _image(path):
  path.parent.mkdir(parents=True, exist_ok=True)
  matplotlib.image.imsave(path, np.zeros((4, 4)))


def test_new_analyses_are_shown(comparison, tmp_path):
  shutil.copy(comparison / 'report.html', tmp_path)
  before = (tmp_path / 'report.html').read_text(encoding='utf-8')
  html_report.refresh_figures(tmp_path)
  assert (tmp_path / 'report.html').read_text(encoding='utf-8') == before
  for name in ('matching', 'matching_units', 'fusion'):
    _image(tmp_path / 'plots' / f'{name}.png')
  (tmp_path / 'matching.md').write_text('table')
  _image(tmp_path / 'analyses/kept_share-2/plots/kept_share.png')
  (tmp_path / 'analyses/kept_share-2/kept_share.md').write_text('table')
  for _ in range(2):
    html_report.refresh_figures(tmp_path)
    page = _parse(tmp_path)
    # There is no table of a fusion.
    assert len(page.loaded) == 3
    assert all(url.startswith('data:image/png;base64,') for url in page.loaded)
    assert page.links[:2] == [
        './matching.md',
        './analyses/kept_share-2/kept_share.md',
    ]
  html_report.refresh_figures(tmp_path / 'plots')  # Has no page.


@pytest.fixture(scope='module')
def browser():
  if _CHROMIUM is None:
    if 'TFF_BN_NEEDS_CHROMIUM' in os.environ:
      pytest.fail('Chromium is not installed.')
    pytest.skip('needs Chromium')
  # Imported late: only these tests need it.
  from playwright import sync_api

  with sync_api.sync_playwright() as playwright:
    chromium = playwright.chromium.launch(
        executable_path=_CHROMIUM, args=_CHROMIUM_FLAGS
    )
    yield chromium
    chromium.close()


class _Tab:
  """A page in the browser, and what it says and loads.

  Attributes:
    page: The page.
    messages: The messages in its console, and its errors.
    requests: The addresses that it requests.
  """

  def __init__(self, browser, path, width, scheme='light'):
    context = browser.new_context(
        viewport=dict(width=width, height=900), color_scheme=scheme
    )
    self.page = context.new_page()
    self.messages, self.requests = [], []
    self.page.on('console', lambda message: self.messages.append(message.text))
    self.page.on('pageerror', lambda error: self.messages.append(str(error)))
    self.page.on('request', lambda request: self.requests.append(request.url))
    self.page.goto(path.as_uri())
    self.wait('document.querySelectorAll(".chart svg").length === 6')

  def wait(self, condition):
    self.page.wait_for_function(condition)

  def count(self, selector):
    return self.page.locator(selector).count()

  def texts(self, selector):
    return self.page.locator(selector).all_text_contents()


_ACCURACY = '[data-column=test_accuracy]'
_LINES = f'{_ACCURACY} .mark-line path'


@pytest.fixture
def open_page(browser, comparison):
  tabs = []

  def open_it(width, scheme='light', path=comparison / 'report.html'):
    tabs.append(_Tab(browser, pathlib.Path(path), width, scheme))
    return tabs[-1]

  yield open_it
  for tab in tabs:
    tab.page.context.close()


@pytest.mark.parametrize(
    ('width', 'scheme'),
    [(390, 'light'), (390, 'dark'), (1400, 'light'), (1400, 'dark')],
)
def test_plots_in_a_browser(open_page, comparison, width, scheme):
  tab = open_page(width, scheme)
  # Nine lines, bands and boxes, and the cells of ten clients and classes.
  assert tab.count(_LINES) == 9
  assert tab.count(f'{_ACCURACY} .mark-area path') == 9
  assert tab.count('[data-kind=clients] .mark-symbol path') == 9 * 9 * 3
  assert tab.count('[data-kind=labels] .mark-rect path') >= 100
  overflow = 'document.documentElement.scrollWidth - innerWidth'
  assert tab.page.evaluate(overflow) <= 0
  background = tab.page.evaluate(
      'getComputedStyle(document.body).backgroundColor'
  )
  assert background == (
      'rgb(255, 255, 255)' if scheme == 'light' else 'rgb(23, 24, 28)'
  )
  assert tab.requests == [(comparison / 'report.html').as_uri()]
  assert not tab.messages
  assert tab.page.evaluate('window.evil') is None


def _ends(tab):
  """Returns where the lines end, in pixels, by colour."""
  paths = [tab.page.locator(_LINES).nth(number) for number in range(9)]
  return {
      path.get_attribute('stroke'): float(
          re.split('[ML]', path.get_attribute('d'))[-1].split(',')[0]
      )
      for path in paths
  }


def test_axis_is_switched(open_page):
  tab = open_page(1400)
  titles = f'{_ACCURACY} .role-axis-title text'
  ends = {}
  for axis, title in (
      ('round', 'Round'),
      ('exchanges', 'Exchanges between server and clients'),
      ('megabytes', 'MB sent'),
      ('seconds', 'Seconds (mean time of a round × rounds)'),
  ):
    tab.page.check(f'[name=axis][value={axis}]')
    tab.wait(
        f'[...document.querySelectorAll("{titles}")]'
        f'.some((text) => text.textContent === "{title}")'
    )
    ends[axis] = _ends(tab)
    assert len(ends[axis]) == 9
  # All runs have as many rounds, and took as long.
  for axis in ('round', 'seconds'):
    assert len(set(ends[axis].values())) == 1
  # After rounds 10 to 30, fedavg has 10 to 30 exchanges, and fedtan 230 to 690.
  # Nothing is sent by centralized, which is a line over the whole width.
  fedavg, fedtan, centralized = '#D55E00', '#009E73', '#000000'
  for axis, share in (
      ('exchanges', math.log(30 / 10) / math.log(690 / 10)),
      # 2.5 to 7.5, and 35 to 105.
      ('megabytes', math.log(7.5 / 2.5) / math.log(105 / 2.5)),
  ):
    width = ends[axis][fedtan]
    assert ends[axis][centralized] == pytest.approx(width)
    assert ends[axis][fedavg] == pytest.approx(share * width, rel=1e-3)
  assert not tab.messages


def test_lines_can_be_hidden(open_page):
  tab = open_page(390)
  tab.page.uncheck('[name=series][value="0"]')
  tab.wait(f'document.querySelectorAll("{_LINES}").length === 8')
  assert not tab.messages


def test_table_is_sorted(open_page, comparison):
  tab = open_page(390)
  accuracies = [float(row[1].split()[0]) for row in _expected_table(comparison)]
  button = tab.page.locator('#results th button').nth(1)
  column = '#results tbody td:nth-child(2)'
  for order in (sorted(accuracies, reverse=True), sorted(accuracies)):
    button.click()
    assert [float(t.split()[0]) for t in tab.texts(column)] == order
  tab.page.locator('#results th button').first.click()
  names = tab.texts('#results tbody td:first-child')
  assert names == sorted(_ALGORITHMS)


def test_sweep_has_filters(browser, open_page, tmp_path):
  runs = [
      report.Run(
          {'algorithm': algorithm, 'gamma': gamma},
          seed,
          [
              dict(
                  round=number,
                  test_accuracy=0.1 * number,
                  test_loss=2.0,
                  client_test_accuracy=0.5,
                  train_loss=1.0,
              )
              for number in (1, 2)
          ],
      )
      for seed in (0, 1)
      for algorithm in ('fedavg', 'fbn')
      for gamma in ('0', '0.5')
  ]
  (tmp_path / 'client_metrics.csv').write_text('client,accuracy\na,0.5\n')
  results = [report.result(run, 1) for run in runs]
  page = _page([tmp_path] * len(runs), results, runs, ('gamma', 'algorithm'))
  html_report.write(tmp_path, page)
  tab = open_page(1400, path=tmp_path / 'report.html')
  assert tab.count(_LINES) == 4
  styles = [
      (
          tab.page.locator(_LINES).nth(number).get_attribute('stroke'),
          tab.page.locator(_LINES)
          .nth(number)
          .get_attribute('stroke-dasharray'),
      )
      for number in range(4)
  ]
  assert len({colour for colour, _ in styles}) == 2
  assert len(set(styles)) == 4
  tab.page.select_option('[data-filter=gamma]', '0.5')
  tab.wait(f'document.querySelectorAll("{_LINES}").length === 2')
  assert not tab.messages
