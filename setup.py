"""Packages tff_bn; the versions that are tested are in requirements.txt."""

import pathlib
import re

import setuptools
from setuptools.command import build_py

_ROOT = pathlib.Path(__file__).parent
# The packages and their folders in the repository.
_PACKAGE_DIR = {
    'tff_bn': 'tff_bn',
    'tff_bn.layers': 'layers',
    'tff_bn.papers': 'papers',
    'tff_bn.programs': 'programs',
}


def _version() -> str:
  text = (_ROOT / 'tff_bn' / '__init__.py').read_text(encoding='utf-8')
  return re.search(r"^__version__ = '(.+)'$", text, re.MULTILINE).group(1)


def _find_packages() -> list[str]:
  packages = []
  for package, folder in _PACKAGE_DIR.items():
    subpackages = setuptools.find_packages(folder)
    packages += [package, *(f'{package}.{name}' for name in subpackages)]
  return packages


class _BuildPy(build_py.build_py):
  """Adds `tff_bn.pth`, so that Python installs the import hook at start-up."""

  def run(self):
    """See the base class."""
    super().run()
    if self.editable_mode:
      target = self.get_finalized_command('install').install_lib
    else:
      target = self.build_lib
    hook = _ROOT / 'tff_bn' / 'imports' / 'tff_imports.py'
    text = ascii(hook.read_text(encoding='utf-8'))
    # Python runs the lines of a .pth file that begin with `import`.
    line = f"import sys; exec({text}, {{'__name__': 'tff_bn.pth'}})\n"
    pathlib.Path(target, 'tff_bn.pth').write_text(line, encoding='ascii')


setuptools.setup(
    name='tff_bn',
    version=_version(),
    description='Batch normalization that works in federated learning.',
    long_description=(
        'Federated algorithms for Keras models with batch normalization, on '
        'TensorFlow Federated: each client has its own data distribution, and '
        'the statistics of its batches differ from the statistics of all data.'
    ),
    author='The tff_bn Authors',
    license='Apache-2.0',
    license_files=['LICENSE'],
    classifiers=[
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    python_requires='>=3.11,<3.14',
    packages=_find_packages(),
    package_dir=_PACKAGE_DIR,
    package_data={
        'tff_bn.papers': ['experiments/*/*.csv', 'experiments/*/*.toml'],
        'tff_bn.programs': ['presets/*.flags', 'templates/*'],
    },
    cmdclass={'build_py': _BuildPy},
    # For tff_bn.layers, convert_batch_norm and add_position_encodings. The
    # user installs a backend for Keras.
    install_requires=['keras>=3.10', 'numpy>=1.26'],
    extras_require={
        # For everything else, together with the packages that need pip's
        # --no-deps: see tff_bn/imports/dependencies.py.
        'federated': [
            'absl-py>=1.0',
            'attrs>=23.1',
            'cachetools>=5.3',
            'dm-tree>=0.1.8',
            'googleapis-common-protos>=1.61',
            'grpcio>=1.46',
            # tensorflow-datasets imports it without asking for it.
            'importlib-resources>=5.0',
            'jax>=0.4.34',
            'jinja2>=3.1',
            'matplotlib>=3.7',
            'pandas>=2.0',
            'portpicker>=1.6',
            'psutil>=5.9',
            'requests>=2.19',
            'scikit-learn>=1.2',
            'scipy>=1.9',
            # `tf.summary` needs it.
            'tensorboard>=2.19',
            'tensorflow>=2.19,<2.22',
            'tensorflow-datasets>=4.9',
            'tqdm>=4.64',
            'typing-extensions>=4.5',
            # The plots of report.html.
            'vl-convert-python>=1.7',
        ],
        # For --dataset=parquet: and hf:, in addition to `federated`.
        'files': ['datasets>=4.0', 'pyarrow>=20.0'],
        # For several machines, in addition to `federated`.
        'ray': ['cloudpickle>=2.2', 'ray>=2.60'],
    },
    entry_points={
        'console_scripts': [
            'tff-bn-train=tff_bn.programs.train:run',
            'tff-bn-compare=tff_bn.papers.compare_with_experiments:run',
            'tff-bn-evaluate=tff_bn.programs.evaluate:run',
            'tff-bn-analyze=tff_bn.papers.analyze:run',
        ]
    },
)
