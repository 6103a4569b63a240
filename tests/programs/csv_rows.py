"""Reads what programs write."""

import csv


def read(path):
  """The rows of a CSV file, as dictionaries of texts."""
  with open(path, newline='', encoding='utf-8') as file:
    return list(csv.DictReader(file))


def cells(markdown):
  """The rows of the tables in a Markdown text."""
  lines = [line for line in markdown.splitlines() if line.startswith('|')]
  return [[c.strip() for c in line.strip('|').split('|')] for line in lines]


def contents(folder):
  """The contents of all files in a folder by their paths."""
  return {
      path.relative_to(folder).as_posix(): path.read_bytes()
      for path in folder.rglob('*')
      if path.is_file()
  }
