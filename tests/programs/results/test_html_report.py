"""Tests of `report.html`, in a browser where there is one."""

import dataclasses
import html.parser
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import urllib.parse

import csv_rows
import matplotlib.image
import numpy as np
import pytest

from tff_bn.programs.results import html_report
from tff_bn.programs.results import report
from tff_bn.programs.runs import run_timing

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
  """Clients of one class each, and one example of the next class."""

  task = 'classification'
  class_names = ()

  def __init__(self):
    self.client_ids = [f'client_{number}' for number in range(9)] + [_EVIL]

  def label_distribution(self):
    return np.diag(np.arange(1, 11)) + np.eye(10, k=1, dtype=int)


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
  run_timing.write(folder, 15.0 + 3 * seed, 30)


def _page(folders, runs, varied=(report.ALGORITHM,)):
  return html_report.Page(
      title='Comparison',
      program='tff-bn-compare',
      flags={
          'algorithms': ','.join(_ALGORITHMS),
          'model': _EVIL,
          'batch_size': '32',
          'sweep': 'gamma=0,1\nrounds=1,2',
      },
      runs=runs,
      folders=folders,
      num_averaged=_AVERAGED,
      varied=varied,
      data=_Data(),
      data_title='digits, 10 clients',
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
  results = report.results(runs, _AVERAGED)
  (folder / 'results.csv').write_text(report.to_csv(results))
  html_report.write(folder, _page(folders, runs))
  return folder


class _Parser(html.parser.HTMLParser):
  """Collects tables, links and what a page would load."""

  def __init__(self):
    super().__init__()
    self.tables = {}
    self.links = []
    self.loaded = []
    self.images = []
    self.preformatted = []
    self.texts = {}
    self.data = ''
    self._table = None
    self._is_json = False
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
    elif tag == 'img':
      self.images.append(attributes['alt'])
    if tag == 'link' or 'src' in attributes:
      self.loaded.append(attributes.get('src', 'link'))
    self._is_json = attributes.get('type') == 'application/json'
    self._path.append(tag)

  def handle_endtag(self, tag):
    self._is_json = False
    while self._path and self._path.pop() != tag:
      pass

  def handle_data(self, data):
    if self._path and self._path[-1] in ('dt', 'dd', 'li', 'p'):
      self.texts.setdefault(self._path[-1], []).append(data)
    if self._is_json:
      self.data += data
    if 'pre' in self._path:
      self.preformatted[-1] += data
    elif {'td', 'th'} & set(self._path):
      self._table[-1][-1] += data


def _parse(folder):
  parser = _Parser()
  parser.feed((folder / 'report.html').read_text(encoding='utf-8'))
  return parser


def test_table_has_the_numbers_of_results_csv(comparison):
  titles, *rows = _parse(comparison).tables['results']
  results = csv_rows.read(comparison / 'results.csv')
  assert [row[0] for row in rows] == list(_ALGORITHMS)
  for row in rows:
    found = [r for r in results if r['algorithm'] == row[0]]
    values = [100 * float(r['client_test_accuracy']) for r in found]
    assert row[titles.index('Client accuracy, %')] == (
        f'{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}'
    )
    assert row[-1] == f'{float(found[0]["megabytes"]):.2f}'


def test_each_run_has_its_numbers_and_files(comparison):
  page = _parse(comparison)
  titles, *rows = page.tables['runs']
  results = csv_rows.read(comparison / 'results.csv')
  assert len(rows) == len(results) == 27
  for row, result in zip(rows, results):
    cells = dict(zip(titles, row, strict=True))
    assert cells['Algorithm'] == result['algorithm']
    assert cells['Seed'] == result['seed']
    assert cells['Loss'] == f'{float(result["test_loss"]):.2f}'
    assert float(cells['Seconds per round']) == 0.5 + 0.1 * int(result['seed'])
    assert cells['Files'].split() == ['folder', 'metrics', 'flags']
  assert len(page.links) == 3 * 27
  for link in page.links:
    assert (comparison / urllib.parse.unquote(link)).exists()


def test_accuracy_of_each_client(comparison):
  titles, *rows = _parse(comparison).tables['clients']
  assert titles == ['Client', *(f'{name}, %' for name in _ALGORITHMS)]
  assert [row[0] for row in rows] == [f'client_{n}' for n in range(9)]
  for number, algorithm in enumerate(_ALGORITHMS, start=1):
    by_client = {}
    for seed in _SEEDS:
      path = comparison / f'runs/{algorithm}-seed{seed}/client_metrics.csv'
      for row in csv_rows.read(path):
        accuracy = 100 * float(row['accuracy'])
        by_client.setdefault(row['client'], []).append(accuracy)
    assert [row[number] for row in rows] == [
        f'{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}'
        for values in by_client.values()
    ]


@pytest.mark.parametrize(
    ('num_clients', 'has_table'),
    [(0, False), (1, True), (50, True), (51, False)],
)
def test_a_table_of_clients_is_short(tmp_path, num_clients, has_table):
  run = report.Run({'algorithm': 'fbn'}, 0, [dict(round=1, test_accuracy=0.5)])
  lines = [f'1,client_{n},{n / 100}' for n in range(num_clients)]
  (tmp_path / 'client_metrics.csv').write_text(
      '\n'.join(['round,client,accuracy', *lines]) + '\n'
  )
  html_report.write(tmp_path, _page([tmp_path], [run]))
  tables = _parse(tmp_path).tables
  assert ('clients' in tables) == has_table
  if has_table:
    assert tables['clients'][0] == ['Client', 'fbn, %']
    assert tables['clients'][1:] == [
        [f'client_{n}', f'{n}.0'] for n in range(num_clients)
    ]


def test_clients_that_a_run_lacks_have_a_dash(tmp_path):
  runs, folders = [], []
  for name, client in (('fedavg', 'a'), ('fedbn', _EVIL)):
    folders.append(tmp_path / name)
    folders[-1].mkdir()
    (folders[-1] / 'client_metrics.csv').write_text(
        f'round,client,accuracy\n1,{client},0.25\n'
    )
    row = dict(round=1, test_accuracy=0.5)
    runs.append(report.Run({'algorithm': name}, 0, [row]))
  html_report.write(tmp_path, _page(folders, runs))
  assert _parse(tmp_path).tables['clients'][1:] == [
      ['a', '25.0', '–'],
      [_EVIL, '–', '25.0'],
  ]


def test_clients_that_did_not_train(comparison, tmp_path):
  assert 'held_out' not in _parse(comparison).tables
  run = report.Run({'algorithm': 'fbn'}, 0, [dict(round=1, test_accuracy=0.5)])
  cells = [['Client', 'averaged, %'], [_EVIL, '12.5']]
  page = _page([tmp_path], [run])
  page = dataclasses.replace(page, held_out=cells, held_out_notes=['A note.'])
  html_report.write(tmp_path, page)
  parsed = _parse(tmp_path)
  assert parsed.tables['held_out'] == cells
  assert 'A note.' in parsed.texts['li']


def test_page_says_what_was_run(comparison):
  texts = _parse(comparison).texts
  assert dict(zip(texts['dt'], texts['dd'], strict=True)) == {
      'Program': 'tff-bn-compare',
      'Data': 'digits, 10 clients',
      'Algorithms': ', '.join(_ALGORITHMS),
      'Sweep': 'gamma=0, 1; rounds=1, 2',
      'Model': _EVIL,
      'Batch size': '32',
      'Versions': (
          'tff_bn 0.5, tensorflow-federated 1.5, tensorflow 2.5, keras 3.5,'
          ' python 4.5'
      ),
  }
  flags = dict(_parse(comparison).tables[None])
  assert flags['--batch_size'] == '32'


def test_page_explains_its_numbers(comparison):
  texts = _parse(comparison).texts
  assert texts['li'][0] == (
      'Accuracies and losses: mean over the last 2 evaluated rounds; mean over'
      ' 3 seeds ± standard deviation. The progress and metrics.csv have the'
      ' values of single rounds.'
  )
  (band,) = (text for text in texts['p'] if 'band' in text)
  assert band.startswith(
      'Line: mean over 3 seeds, band: ± one standard deviation.'
  )
  points = 'clients of all seeds; of a run with more than 50 clients, 20.'
  assert any(points in text for text in texts['p'])
  # Also below the table of the single runs.
  assert (
      'Accuracies and losses: mean over the last 2 evaluated rounds.'
      in texts['p']
  )
  # The labels differ from seed to seed.
  assert 'centralized, seed 0' in texts['p']


def _plot_data(folder):
  return json.loads(_parse(folder).data)


def _write_swept(folder, numbers, metric='accuracy', names=('a', 'b')):
  """Writes the page of runs with two seeds of a sweep of two flags."""
  runs, folders = [], []
  for seed in (0, 1):
    for number, value in numbers.items():
      row = {'round': 1, f'test_{metric}': value + seed / 1000}
      labels = dict(zip(names, (str(number), str(number % 3))))
      runs.append(report.Run(labels, seed, [row]))
      folders.append(folder / f'{number} {seed}')
      folders[-1].mkdir()
      (folders[-1] / 'client_metrics.csv').write_text(
          f'round,client,{metric}\n1,client_{number},0.25\n'
      )
  html_report.write(folder, _page(folders, runs, names))
  return runs


@pytest.mark.parametrize('names', [('a',), ('a', 'b')])
@pytest.mark.parametrize(
    ('metric', 'sign'),
    [
        ('accuracy', -1),
        pytest.param('mae', 1, marks=pytest.mark.slow),
        ('mine', 0),
    ],
)
def test_charts_show_the_best_of_many_lines(tmp_path, names, metric, sign):
  rng = np.random.default_rng(0)
  values = rng.permutation(103) / 100
  values[[1, 2]] = np.nan  # Two diverged runs.
  numbers = dict(enumerate(values))
  _write_swept(tmp_path, numbers, metric, names)
  best = range(100)
  if sign:
    finite = [n for n in range(103) if not np.isnan(values[n])]
    best = sorted(sorted(finite, key=lambda n: sign * values[n])[:100])
  page, data = _parse(tmp_path), _plot_data(tmp_path)
  assert [s['labels']['a'] for s in data['series']] == list(map(str, best))
  lines = {series['name'] for series in data['series']}
  clients = {row['client'] for row in data['data']['clients']}
  assert clients == {f'client_{n}' for n in best}
  assert {row['name'] for row in data['data']['clients']} == lines
  assert {row['name'] for row in data['data']['points']} <= lines
  assert len(page.tables['results']) == 1 + 103
  assert len(page.tables['runs']) == 1 + 2 * 103
  (sentence,) = (text for text in page.texts['p'] if 'lines' in text)
  assert sentence.startswith('There are 103 lines. ')
  which = 'the 100 lines with the best “' if sign else 'the 100 first lines. '
  assert which in sentence


def test_few_lines_are_all_shown(tmp_path):
  numbers = dict.fromkeys(range(100), 0.5)
  _write_swept(tmp_path, numbers)
  page = _parse(tmp_path)
  assert len(_plot_data(tmp_path)['series']) == 100
  assert not any('There are' in text for text in page.texts['p'])


def test_data_of_the_charts(comparison):
  report_json = _plot_data(comparison)
  assert [line['name'] for line in report_json['series']] == list(_ALGORITHMS)
  data = report_json['data']
  points = [point for point in data['points'] if point['name'] == 'fedtan']
  costs = ('round', 'exchanges', 'megabytes', 'seconds')
  assert [tuple(map(point.get, costs)) for point in points] == [
      (n, 23 * n, 3.5 * n, 0.6 * n) for n in _ROUNDS
  ]
  counts = _Data().label_distribution()
  assert data['labels'] == [
      {'client': client, 'label': label, 'count': counts[number, label]}
      for number, client in enumerate(_Data().client_ids)
      for label in range(10)
  ]
  run = csv_rows.read(comparison / 'runs/fedtan-seed2/client_metrics.csv')
  assert [
      (point['client'], point['accuracy'])
      for point in data['clients']
      if (point['name'], point['seed']) == ('fedtan', 2)
  ] == [(row['client'], float(row['accuracy'])) for row in run]


def test_names_of_classes_are_shown(tmp_path):
  run = report.Run({'algorithm': 'a'}, 0, [dict(round=1, test_accuracy=0.5)])
  page = _page([tmp_path], [run])
  page.data.class_names = ['cat', '<b>dog</b>', *'cdefghij']
  html_report.write(tmp_path, page)
  labels = _plot_data(tmp_path)['data']['labels']
  assert [point['label'] for point in labels[:10]] == page.data.class_names
  names = 'cat, <b>dog</b>, c, d, e, f, g, h, i, j'
  assert names in _parse(tmp_path).texts['dd']
  assert '<b>dog' not in (tmp_path / 'report.html').read_text(encoding='utf-8')


def test_time_of_a_round(tmp_path):
  assert html_report.seconds_per_round([tmp_path]) is None
  for name, seconds, rounds in (('a', 30.0, 10), ('b', 5.0, 5), ('c', 1.0, 0)):
    (tmp_path / name).mkdir()
    run_timing.write(tmp_path / name, seconds, rounds)
  folders = [tmp_path, *(tmp_path / name for name in 'abc')]
  assert html_report.seconds_per_round(folders) == 2.0


def test_links_to_unusual_folders(tmp_path):
  run = tmp_path / 'a b#1%41:c'
  _write_run(run, 'fbn', 0)
  runs = [report.Run({'algorithm': 'fbn'}, 0, report.read_rows(run))]
  html_report.write(tmp_path, _page([run], runs))
  links = _parse(tmp_path).links
  assert links == [
      './a%20b%231%2541%3Ac',
      './a%20b%231%2541%3Ac/metrics.csv',
      './a%20b%231%2541%3Ac/flags.txt',
  ]


def test_page_says_that_clients_are_hidden(tmp_path):
  run = report.Run({'algorithm': 'a'}, 0, [dict(round=1, test_accuracy=0.5)])
  page = _page([tmp_path], [run])
  page.data.client_ids = [f'c{number}' for number in range(300)]
  html_report.write(tmp_path, page)
  hint = ''.join(_parse(tmp_path).texts['p'])
  assert 'a, seed 0; the first 200 of 300 clients' in hint


def test_name_of_the_algorithms():
  runs = [
      report.Run({'algorithm': algorithm, 'gamma': gamma}, 0, [])
      for algorithm in ('fbn', 'fedavg')
      for gamma in '01'
  ]
  assert html_report.name_algorithms(runs) == 'fbn, fedavg'
  runs = [report.Run({'scheme': 'a b'}, 0, [])]
  assert html_report.name_algorithms(runs) == 'scheme=a b'


def test_texts_of_users_are_escaped(comparison):
  text = (comparison / 'report.html').read_text(encoding='utf-8')
  assert '<script>window' not in text
  assert '&lt;script&gt;window' in text
  # It is small, and loads nothing.
  assert len(text.encode()) < 2e6
  assert not _parse(comparison).loaded
  assert "content=\"default-src 'none'; img-src data:;" in text


def test_command_repeats_the_flags(comparison):
  short, full = _parse(comparison).preformatted
  assert short == (
      'tff-bn-compare --flagfile=flags.txt --output_dir=NEW_FOLDER'
  )
  assert '    --sweep=gamma=0,1 \\\n    --sweep=rounds=1,2 \\\n' in full
  assert shlex.split(full.replace('\\\n', '')) == [
      'tff-bn-compare',
      f'--algorithms={",".join(_ALGORITHMS)}',
      f'--model={_EVIL}',
      '--batch_size=32',
      '--sweep=gamma=0,1',
      '--sweep=rounds=1,2',
      '--output_dir=NEW_FOLDER',
  ]
  assert full.endswith('--output_dir=NEW_FOLDER')


def test_a_run_without_costs_and_time(tmp_path):
  runs = [report.Run({'algorithm': 'a'}, 0, [dict(round=1, test_accuracy=0.5)])]
  html_report.write(tmp_path, _page([tmp_path], runs))
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
    assert page.images == ['matching', 'matching_units', 'kept_share']
    assert len(page.loaded) == 3
    assert all(url.startswith('data:image/png;base64,') for url in page.loaded)
    assert page.links[:2] == [
        './matching.md',
        './analyses/kept_share-2/kept_share.md',
    ]
  html_report.refresh_figures(tmp_path / 'plots')  # Has no page.
  (tmp_path / 'plots/matching_units.png').unlink()
  _image(tmp_path / 'plots/experiment.png')
  (tmp_path / 'experiment.md').write_text('table')
  html_report.refresh_figures(tmp_path)
  page = _parse(tmp_path)
  assert page.images == ['experiment', 'matching', 'kept_share']
  assert page.links[0] == './experiment.md'


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


_ACCURACY = '[data-chart=test_accuracy]'
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


@pytest.mark.parametrize(('width', 'scheme'), [(390, 'dark'), (1400, 'light')])
def test_plots_in_a_browser(open_page, comparison, width, scheme):
  tab = open_page(width, scheme)
  # Nine lines, bands and boxes, and the cells of ten clients and classes.
  assert tab.count(_LINES) == 9
  assert tab.count(f'{_ACCURACY} .mark-area path') == 9
  assert tab.count('[data-chart=clients] .mark-symbol path') == 9 * 9 * 3
  assert tab.count('[data-chart=labels] .mark-rect path') >= 100
  overflow = 'document.documentElement.scrollWidth - innerWidth'
  assert tab.page.evaluate(overflow) <= 0
  background = tab.page.evaluate(
      'getComputedStyle(document.body).backgroundColor'
  )
  assert background == (
      'rgb(255, 255, 255)' if scheme == 'light' else 'rgb(23, 24, 28)'
  )
  text = tab.page.evaluate('getComputedStyle(document.body).color')
  brightness = max(map(int, re.findall('[0-9]+', text)))
  assert brightness < 50 if scheme == 'light' else brightness > 200
  assert tab.page.locator(_LINES).first.get_attribute('stroke') == (
      '#000000' if scheme == 'light' else '#f2f2f2'
  )
  _, second, empty = (
      tab.page.locator('[data-chart=labels] .mark-rect path').nth(number)
      for number in range(3)
  )
  label = second.get_attribute('aria-label')
  assert label == 'Class: 1; Client: client_0; Examples: 1'
  assert empty.get_attribute('fill') == (
      'rgb(242, 245, 250)' if scheme == 'light' else 'rgb(34, 36, 42)'
  )
  assert tab.page.is_checked('[name=axis][value=round]')
  assert tab.requests == [(comparison / 'report.html').as_uri()]
  assert not tab.messages
  assert tab.page.evaluate('window.evil') is None


def test_dark_mode_is_followed(open_page):
  tab = open_page(1400)
  tab.page.emulate_media(color_scheme='dark')
  tab.wait(
      f'document.querySelector("{_LINES}").getAttribute("stroke") === "#f2f2f2"'
  )
  # Browsers draw form elements and scroll bars after it.
  scheme = tab.page.locator('meta[name=color-scheme]').get_attribute('content')
  assert scheme == 'light dark'


@pytest.mark.slow
def test_plots_follow_the_width_of_the_window(open_page):
  tab = open_page(1400)
  tab.page.set_viewport_size(dict(width=390, height=900))
  # The style sheet makes a plot narrower, too, but with smaller letters.
  tab.wait('document.querySelector(".chart svg").getAttribute("width") < 390')
  tab.wait(f'document.querySelectorAll("{_LINES}").length === 9')


def _points(tab, x):
  """Returns x and the mean of each line's points, as the browser says them."""
  found = {}
  for element in tab.page.locator(f'{_ACCURACY} .mark-symbol path').all():
    label = element.get_attribute('aria-label')
    point = dict(part.split(': ') for part in label.split('; '))
    place = float(point[x].replace(',', ''))
    found.setdefault(point['Line'], []).append((place, float(point['Mean'])))
  return found


@pytest.mark.slow
def test_axis_is_switched(open_page, comparison):
  tab = open_page(1400)
  data = _plot_data(comparison)['data']['points']
  for axis, title in (
      ('round', 'Round'),
      ('exchanges', 'Exchanges between server and clients'),
      ('megabytes', 'MB sent'),
      ('seconds', 'Seconds (mean time of a round × rounds)'),
  ):
    tab.page.check(f'[name=axis][value={axis}]')
    tab.wait(
        f'[...document.querySelectorAll("{_ACCURACY} .role-axis-title text")]'
        f'.some((text) => text.textContent === "{title}")'
    )
    expected = {}
    for point in data:
      # There is no place for round 0 on a logarithmic axis.
      if point['round'] or axis in ('round', 'seconds'):
        place = point[axis], pytest.approx(point['test_accuracy'], abs=1e-4)
        expected.setdefault(point['name'], []).append(place)
    found = _points(tab, title)
    if axis not in ('round', 'seconds'):
      (left, first), (right, last) = found.pop('centralized')
      *_, (_, mean) = expected.pop('centralized')
      assert first == last == mean
      places = [place for line in expected.values() for place, _ in line]
      assert (left, right) == (min(places), max(places))
    assert found == expected
  assert not tab.messages


def test_lines_can_be_hidden(open_page):
  tab = open_page(390)
  colors = [
      tab.page.locator(_LINES).nth(n).get_attribute('stroke') for n in range(9)
  ]
  tab.page.uncheck('[name=series][value="0"]')
  tab.wait(f'document.querySelectorAll("{_LINES}").length === 8')
  # The other lines keep their colors.
  assert colors[1:] == [
      tab.page.locator(_LINES).nth(n).get_attribute('stroke') for n in range(8)
  ]
  points = '[data-chart=clients] .mark-symbol path'
  tab.wait(f'document.querySelectorAll("{points}").length === {8 * 9 * 3}')
  assert not tab.messages


def test_table_is_sorted(open_page, comparison):
  tab = open_page(390)
  _, *rows = _parse(comparison).tables['results']
  accuracies = [float(row[1].split()[0]) for row in rows]
  button = tab.page.locator('#results th button').nth(1)
  column = '#results tbody td:nth-child(2)'
  for order in (sorted(accuracies, reverse=True), sorted(accuracies)):
    button.click()
    assert [float(t.split()[0]) for t in tab.texts(column)] == order
  tab.page.locator('#results th button').first.click()
  names = tab.texts('#results tbody td:first-child')
  assert names == sorted(_ALGORITHMS)
  # Only the last title has an arrow.
  assert tab.count('#results th[aria-sort]') == 1
  arrows = []
  for _ in range(2):
    arrows.append(
        tab.page.evaluate(
            'getComputedStyle('
            'document.querySelector("#results th[aria-sort] button"), "::after"'
            ').content'
        )
    )
    tab.page.locator('#results th button').first.click()
  assert arrows == ['" ↑"', '" ↓"']
  tab.page.locator('#runs th button').first.click()
  names = tab.texts('#runs tbody td:first-child')
  assert names == sorted(3 * _ALGORITHMS)


def test_what_is_no_number_is_sorted_last(open_page, tmp_path):
  runs = [
      report.Run(
          {'algorithm': name},
          0,
          [dict(row, round=1, test_accuracy=0.5, client_test_accuracy=0.5)],
      )
      for name, row in {
          'a': dict(test_loss=3.0, train_loss=1.0),
          'b': dict(train_loss=1.0),
          'c': dict(test_loss=math.inf, train_loss=1.0),
          'd': dict(test_loss=20.0, train_loss=1.0),
      }.items()
  ]
  (tmp_path / 'client_metrics.csv').write_text(
      'round,client,accuracy\n1,a,0.5\n'
  )
  html_report.write(tmp_path, _page([tmp_path] * 4, runs))
  tab = open_page(1400, path=tmp_path / 'report.html')
  title = tab.page.locator('#results th button', has_text=re.compile('^Loss$'))
  for order in ('cdab', 'adcb'):
    title.click()
    assert ''.join(tab.texts('#results tbody td:first-child')) == order


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
  (tmp_path / 'client_metrics.csv').write_text(
      'round,client,accuracy\n1,a,0.5\n'
  )
  page = _page([tmp_path] * len(runs), runs, ('gamma', 'algorithm'))
  html_report.write(tmp_path, page)
  tab = open_page(1400, path=tmp_path / 'report.html')
  assert tab.count(_LINES) == 4

  def line_styles():
    return [
        tuple(map(line.get_attribute, ('stroke', 'stroke-dasharray')))
        for line in tab.page.locator(_LINES).all()
    ]

  styles = line_styles()
  assert len({color for color, _ in styles}) == 2
  assert len(set(styles)) == 4
  tab.page.select_option('[data-filter=gamma]', '0.5')
  tab.wait(f'document.querySelectorAll("{_LINES}").length === 2')
  # The lines of fedavg and fbn with gamma=0.5.
  assert line_styles() == styles[1::2]
  assert not tab.messages
