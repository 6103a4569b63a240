"""The directions in which values vary, from their inner products."""

import tensorflow as tf

from tff_bn.aggregators import subsets

# The number of matrix elements whose eigenvalues are computed at a time.
_BLOCK_ELEMENTS = 2**20


def centered(products: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
  """Computes inner products of the differences from weighted means.

  Args:
    products: The inner products of n rows' differences from some point, of
      shape `[n, n]`.
    shares: For each of m means, the weights of the rows, with the sum 1; of
      shape `[m, n]`.

  Returns:
    The inner products of the rows' differences from each mean, of shape
    `[m, n, n]`.
  """
  with_mean = tf.matmul(shares, products)
  mean_with_mean = tf.reduce_sum(shares * with_mean, axis=1)
  return (
      products
      - with_mean[:, tf.newaxis]
      - with_mean[:, :, tf.newaxis]
      + mean_with_mean[:, tf.newaxis, tf.newaxis]
  )


def largest_eigenvalues(products: tf.Tensor, is_inside: tf.Tensor) -> tf.Tensor:
  """Computes the largest eigenvalue of the scatter matrix of each subset.

  Args:
    products: See `centered`; float64.
    is_inside: The rows in each subset, booleans of shape `[m, n]`.

  Returns:
    float64 of shape `[m]`.
  """
  included = tf.cast(is_inside, tf.float64)
  size = tf.reduce_sum(included, axis=1, keepdims=True)
  # The Gram matrix of the differences from the subset's mean has the same
  # nonzero eigenvalues as the scatter matrix.
  gram = centered(products, included / size)
  are_both = is_inside[:, tf.newaxis] & is_inside[:, :, tf.newaxis]
  gram = tf.where(are_both, gram, tf.zeros_like(gram))
  return tf.reduce_max(tf.linalg.eigvalsh(gram), axis=1)


def largest_eigenvalues_of_all(
    products: tf.Tensor, counts: tf.Tensor, num_left_out: tf.Tensor
) -> tf.Tensor:
  """Computes `largest_eigenvalues` for all subsets of a size, in blocks.

  Args:
    products: See `centered`; float64.
    counts: See `subsets.subsets_of_ranks`.
    num_left_out: The number of rows that are not in a subset.

  Returns:
    float64 of shape `[m]`, in the subsets' lexicographic order.
  """
  num_rows = tf.shape(products)[0]
  num_sets = counts[num_rows, num_left_out]
  block = tf.maximum(_BLOCK_ELEMENTS // (num_rows * num_rows), 1)
  block = tf.cast(block, tf.int64)

  def compute(start, eigenvalues):
    ranks = tf.range(start, tf.minimum(start + block, num_sets))
    found = largest_eigenvalues(
        products, subsets.subsets_of_ranks(counts, num_left_out, ranks)
    )
    return start + block, tf.concat([eigenvalues, found], axis=0)

  _, eigenvalues = tf.while_loop(
      lambda start, _: start < num_sets,
      compute,
      (tf.zeros([], tf.int64), tf.zeros([0], tf.float64)),
      shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
  )
  return eigenvalues


def main_direction(
    products: tf.Tensor, shares: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Finds the direction in which weighted rows vary most.

  Args:
    products: See `centered`.
    shares: The rows' weights, with the sum 1; of shape `[n]`.

  Returns:
    The largest eigenvalue of the weighted covariance matrix, and for each row
    the inner product of its difference from the mean with an eigenvector of an
    unknown length, of shape `[n]`.
  """
  (gram,) = tf.unstack(centered(products, shares[tf.newaxis]))
  # This matrix has the nonzero eigenvalues of the covariance matrix. Its
  # eigenvector u gives v = Σ √share_i u_i (x_i - μ), up to the length.
  roots = tf.sqrt(shares)
  eigenvalues, vectors = tf.linalg.eigh(roots * gram * roots[:, tf.newaxis])
  return eigenvalues[-1], tf.linalg.matvec(gram, roots * vectors[:, -1])
