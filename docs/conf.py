"""Configuration of Sphinx, which builds the documentation (`make docs`).

The source folder is the root of the repository, so that links between README,
docs/, CONTRIBUTING and benchmarks/results are the same here and on GitHub.
"""

import pathlib
import re

from sphinx import addnodes

project = 'tff_bn'
author = 'The tff_bn Authors'
root_doc = 'docs/index'
include_patterns = [
    '*.md',
    'benchmarks/results/**.md',
    'docs/**.md',
    'docs/**.rst',
]
# Folders that are not searched.
exclude_patterns = ['.*', 'build', 'dist', 'runs']

extensions = [
    'myst_parser',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
]
# Headings get the same anchors as on GitHub.
myst_heading_anchors = 3
# Docstrings write code in single backquotes.
default_role = 'code'
autodoc_default_options = {'members': True, 'show-inheritance': True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# The sections of the docstrings of Keras's layers.
napoleon_custom_sections = [
    ('Call arguments', 'params_style'),
    'Input shape',
    'Output shape',
    'Reference',
]

html_theme = 'furo'
html_static_path = ['static']
html_css_files = ['site.css']
html_title = 'tff_bn'
html_copy_source = False
html_show_copyright = False


def _to_rst(app, what, name, obj, options, lines):
  """Translates Markdown in a docstring: fences, tables and vertical bars."""
  del app, what, name, obj, options
  translated = []
  is_code = is_table = False
  for line in lines:
    text = line.strip()
    indent = line[: len(line) - len(line.lstrip())]
    if text.startswith('```'):
      is_code = not is_code
      translated += ['', f'{indent}::', ''] if is_code else ['']
    elif is_code:
      translated.append(f'  {line}')
    elif text.startswith('| '):
      if not is_table:
        translated += [
            '',
            f'{indent}.. list-table::',
            f'{indent}   :header-rows: 1',
            '',
        ]
      if not re.fullmatch(r'[| :-]+', text):
        first, *others = text.strip('|').split(' | ')
        translated.append(f'{indent}   * - {first.strip()}')
        translated += [f'{indent}     - {cell.strip()}' for cell in others]
    else:
      if is_table:
        translated.append('')
      translated.append(line if '`' in line else line.replace('|', r'\|'))
    is_table = text.startswith('| ') and not is_code
  lines[:] = translated


def _show_folders_as_text(app, doctree):
  """Replaces links to folders, which have no page, by their text."""
  page = pathlib.Path(app.env.doc2path(app.env.docname))
  for node in list(doctree.findall(addnodes.pending_xref)):
    if (page.parent / node['reftarget']).is_dir():
      node.replace_self(node.children)


def setup(app):
  """Registers the translation of docstrings and of links to folders."""
  app.connect('autodoc-process-docstring', _to_rst, priority=400)
  app.connect('doctree-read', _show_folders_as_text)
