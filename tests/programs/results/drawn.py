"""What a chart shows, read from its SVG."""

import html
import re

import vl_convert

from tff_bn.programs.results import charts


def _svg(chart):
  return vl_convert.vegalite_to_svg({**chart, 'config': charts.config('light')})


def marks(chart, *names):
  """Returns the marks that have all these fields, as mappings of texts."""
  labels = re.findall('aria-label="([^"]*)"', _svg(chart))
  found = [
      dict(part.split(': ', 1) for part in html.unescape(label).split('; '))
      for label in labels
      if all(f'{name}: ' in label for name in names)
  ]
  return found


def lines(chart, x='Round'):
  """Returns the points (x, mean) of each line of a chart."""
  found = {}
  for mark in marks(chart, 'Mean'):
    point = float(mark[x].replace(',', '')), float(mark['Mean'])
    found.setdefault(mark['Line'], []).append(point)
  return found


def texts(chart):
  """Returns all texts; a text of several lines has spaces between them."""
  found = re.findall(
      '<text(?![^>]* opacity="0")[^>]*>(.*?)</text>', _svg(chart)
  )
  spaced = [re.sub('</tspan><tspan[^>]*>', ' ', text) for text in found]
  return [html.unescape(re.sub('<[^>]*>', '', text)) for text in spaced]


def white_texts(chart):
  """Returns the texts in white letters."""
  return re.findall('<text[^>]* fill="white"[^>]*>(.*?)</text>', _svg(chart))


def title(chart):
  """Returns the title with spaces between its lines."""
  return ' '.join(chart['title']['text'])
