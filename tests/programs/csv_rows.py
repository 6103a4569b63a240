"""Reads what programs write."""

import csv


def read(path):
  """The rows of a CSV file, as dictionaries of texts."""
  with open(path, newline='', encoding='utf-8') as file:
    return list(csv.DictReader(file))
