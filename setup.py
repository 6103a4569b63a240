"""Packages tff_bn; the versions that work together are in requirements.txt."""

import runpy

import setuptools

# The folders of the repository and what they are called in the package.
_PACKAGE_DIR = {
    'tff_bn': 'tff_bn',
    'tff_bn.layers': 'layers',
    'tff_bn.programs': 'programs',
}


def _find_packages() -> list[str]:
  packages = []
  for package, folder in _PACKAGE_DIR.items():
    subpackages = setuptools.find_packages(folder)
    packages += [package, *(f'{package}.{name}' for name in subpackages)]
  return packages


setuptools.setup(
    name='tff_bn',
    version=runpy.run_path('tff_bn/__init__.py')['__version__'],
    description='Batch normalization that works in federated learning.',
    long_description=(
        'Federated algorithms for Keras models with batch normalization, on '
        'TensorFlow Federated: each client has its own data distribution, and '
        'the statistics of its batches are not those of all the data.'
    ),
    author='The tff_bn Authors',
    license='Apache-2.0',
    license_files=['LICENSE'],
    classifiers=[
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    python_requires='>=3.10,<3.12',
    packages=_find_packages(),
    package_dir=_PACKAGE_DIR,
    package_data={'tff_bn.programs': ['presets/*.flags']},
    install_requires=[
        'absl-py>=1.0',
        'matplotlib>=3.7',
        'numpy>=1.25,<2',
        'scikit-learn>=1.2',
        'scipy>=1.9',
        'tensorflow>=2.14,<2.15',
        'tensorflow-datasets>=4.9',
        'tqdm>=4.64',
        'typing-extensions>=4.5',
        # Newer ones of what tensorflow-datasets needs are installed without
        # complaint, but need a newer NumPy and a newer protobuf.
        'pyarrow<18',
        'tensorflow-metadata<1.18',
    ],
    extras_require={
        # Apart, because pip cannot resolve it: this release of TensorFlow
        # Federated asks for a jaxlib that is no longer published.
        # requirements.txt, installed with --no-deps, has what works.
        'federated': [
            'grpcio>=1.46',
            'portpicker>=1.6',
            'psutil>=5.9',
            'tensorflow-federated>=0.87,<0.88',
        ],
    },
    entry_points={
        'console_scripts': [
            'tff-bn-train=tff_bn.programs.train:run',
            'tff-bn-compare=tff_bn.programs.compare:run',
            'tff-bn-evaluate=tff_bn.programs.evaluate:run',
            'tff-bn-analyze=tff_bn.programs.analyze:run',
            'tff-bn-worker=tff_bn.programs.worker:run',
        ]
    },
)
