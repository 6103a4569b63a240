"""Names of the datasets; importing this imports no TensorFlow."""

# Name -> what the dataset is.
DATASET_NAMES = {
    'digits': "scikit-learn's 1,797 handwritten digits of 8x8 pixels (offline)",
    'digits_domains': (
        'the same digits in five domains: plain, inverted, low contrast, noisy'
        ' background, blurred and shifted (offline)'
    ),
    'emnist': (
        "TensorFlow Federated's EMNIST: digits of 3,383 writers, 28x28 pixels"
        ' (downloaded on first use)'
    ),
    'emnist_synthetic': (
        'ten images in the format of emnist for each of two writers (offline)'
    ),
}

# The form of all other names of datasets.
OTHER_DATASETS = (
    'tfds:NAME (TensorFlow Datasets), npz:PATH or a path that ends in .npz (a'
    ' NumPy archive with x_train, y_train, x_test and y_test), or folder:PATH'
    ' (images in PATH/train/LABEL/ and PATH/test/LABEL/)'
)

TFDS_PREFIX = 'tfds:'
NPZ_PREFIX = 'npz:'
NPZ_SUFFIX = '.npz'
FOLDER_PREFIX = 'folder:'


def is_other_dataset(name: str) -> bool:
  """Whether a name has one of the forms of `OTHER_DATASETS`."""
  return name.startswith(
      (TFDS_PREFIX, NPZ_PREFIX, FOLDER_PREFIX)
  ) or name.endswith(NPZ_SUFFIX)
