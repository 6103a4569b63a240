"""Distances between the rows of a matrix, and combinations of its rows.

Attackers can send any finite values. In float32, the square of 1e30 overflows,
and if the rows are similar, as statistics of consecutive rounds are, the
difference of their squares cancels. So distances are first computed in the
dtype of the values, which is fast. If squares overflow or underflow, or if too
many digits cancel, they are computed in float64, from the differences of the
rows from a central row.
"""

from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import tensorflow as tf

# The number of columns that are cast to float64 at a time.
_BLOCK_COLUMNS = 2**13
# The number of elements in a block of rows of `clipped_mean`.
_BLOCK_ELEMENTS = 2**20
# Entries are clipped here, so that sums of squares do not overflow in float64.
_LARGEST = 1e140
# If half of a row's squared distances are below this share of its squared
# length, their digits may have canceled.
_MIN_SHARE = 1 / 16


def squared_distances(values: tf.Tensor) -> tf.Tensor:
  """Computes the squared Euclidean distances between rows.

  This takes one matrix product in the dtype of the values. If the product
  overflows or underflows, or if too many digits cancel, the distances are
  computed in float64. Otherwise a squared distance of float32 rows is wrong by
  about 1e-6 times the squared lengths of the two rows. These are at most 16
  times the squared radius of a ball around the row that contains more than half
  of the rows.

  Args:
    values: Finite floats of shape `[n, d]`, with n ≥ 1.

  Returns:
    float64 of shape `[n, n]`, finite and symmetric, with zeros on the diagonal.
  """
  products = _products(values)
  # Rounding must not decide which of two rows is nearer to the other.
  products = (products + tf.transpose(products)) / 2
  approximate = from_products(products)
  return tf.cond(
      _is_accurate(products, approximate, values.dtype),
      lambda: approximate,
      lambda: from_products(_centered_products(values, approximate)[0]),
  )


def medoid_products(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Computes the inner products of the rows' differences from their medoid.

  The medoid is the row with the least sum of distances from the other rows.
  This takes one matrix product in the dtype of the values.

  Args:
    values: Finite floats of shape `[n, d]`, with n ≥ 1.

  Returns:
    The products, float64 of shape `[n, n]`, and whether they are as accurate as
    `squared_distances`. If not, the products are 0.
  """
  products = _products(values)
  squared = from_products(products)
  is_accurate = _is_accurate(products, squared, values.dtype)
  medoid = tf.argmin(tf.reduce_sum(tf.sqrt(squared), axis=1))
  from_medoid = tf.gather(products, medoid)
  centered = (
      products
      - from_medoid
      - from_medoid[:, tf.newaxis]
      + tf.gather(from_medoid, medoid)
  )
  return tf.where(is_accurate, centered, tf.zeros_like(centered)), is_accurate


def middle_products(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Computes the inner products of the rows' differences from a central row.

  Args:
    values: Finite floats of shape `[n, d]`, with n ≥ 1.

  Returns:
    The products, float64 of shape `[n, n]`, and the central row, float64 of
    shape `[d]`. It is the row with the smallest ball around it that contains
    more than half of the rows, so it is no outlier.
  """
  return _centered_products(values, from_products(_products(values)))


def clipped_mean(
    values: tf.Tensor, center: tf.Tensor, radius: float
) -> tuple[tf.Tensor, tf.Tensor]:
  """Moves a point by the mean of the rows' clipped differences from it.

  This computes in the dtype of the values.

  Args:
    values: Finite floats of shape `[n, d]`, with n ≥ 1.
    center: The point, of shape `[d]`, with the dtype of the values.
    radius: The length at which differences are clipped.

  Returns:
    The moved point, of shape `[d]`, and whether squares neither overflowed nor
    underflowed. If they did, the point is meaningless.
  """
  dtype = values.dtype
  num_rows = tf.shape(values)[0]
  squared = _squared_in_dtype(values, center)
  is_accurate = tf.reduce_all(
      tf.math.is_finite(squared)
      & (tf.maximum(squared, radius * radius) >= _smallest_sum(values))
  )
  shares = radius / tf.maximum(tf.sqrt(squared), radius)
  weights = tf.cast(shares / tf.cast(num_rows, tf.float64), dtype)
  # The center's weight is the rest of the rounded weights, so the result is
  # right even if the center is far from the origin.
  rest = tf.cast(1 - tf.reduce_sum(tf.cast(weights, tf.float64)), dtype)
  moved = tf.linalg.matvec(values, weights, transpose_a=True)
  return rest * center + moved, is_accurate


def lengths(values: tf.Tensor) -> tf.Tensor:
  """Computes the Euclidean lengths of rows.

  Args:
    values: Finite floats of shape `[n, d]`, with n ≥ 1.

  Returns:
    float64 of shape `[n]`, finite.
  """
  squared = _squared_in_dtype(values)
  return tf.sqrt(
      tf.cond(
          _are_in_range(squared, values),
          lambda: squared,
          lambda: squared_lengths(
              values, tf.zeros([values.shape[1]], tf.float64)
          ),
      )
  )


def squared_distances_from_row(
    values: tf.Tensor, position: tf.Tensor
) -> tf.Tensor:
  """Computes the squared Euclidean distances of all rows from one of them.

  Args:
    values: Finite floats of shape `[n, d]`.
    position: The number of the row, an int32 scalar.

  Returns:
    float64 of shape `[n]`, finite, with 0 for the row itself.
  """
  center = tf.gather(values, position)
  squared = _squared_in_dtype(values, center)
  is_other = tf.not_equal(tf.range(tf.shape(values)[0]), position)
  others = tf.boolean_mask(squared, is_other)
  return tf.cond(
      _are_in_range(others, values),
      lambda: squared,
      lambda: squared_lengths(values, tf.cast(center, tf.float64)),
  )


def scale_rows(values: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
  """Multiplies each row by a number.

  Args:
    values: Finite floats of shape `[n, d]`.
    factors: float64 of shape `[n]`, between 0 and 1.

  Returns:
    Finite floats of shape `[n, d]`. Rows with the factor 1 keep their bits.
  """
  # A factor may be too small for the dtype if the row is large. Its square
  # root is not.
  roots = tf.cast(tf.sqrt(factors), values.dtype)[:, tf.newaxis]
  return tf.cond(
      tf.reduce_all(factors >= _tiny(values.dtype)),
      lambda: tf.cast(factors, values.dtype)[:, tf.newaxis] * values,
      lambda: roots * (roots * values),
  )


def squared_lengths(values: tf.Tensor, center: tf.Tensor) -> tf.Tensor:
  """Computes the squared distances of rows from a point in float64.

  Args:
    values: Finite floats of shape `[n, d]`.
    center: float64 of shape `[d]`.

  Returns:
    float64 of shape `[n]`.
  """
  return _sum_over_blocks(
      values,
      center,
      lambda x: tf.reduce_sum(tf.math.square(x), axis=1),
      [None],
  )


def move(values: tf.Tensor, center: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
  """Moves a point by the weighted sum of the rows' differences from it.

  Args:
    values: Finite floats of shape `[n, d]`.
    center: float64 of shape `[d]`.
    weights: float64 of shape `[n]`.

  Returns:
    `center + Σ weights_i (values_i - center)`, float64 of shape `[d]`.
  """
  size = values.shape[1]
  num_blocks = _num_blocks(values)

  def body(i, results):
    x = _block(values, center, i)
    return i + 1, results.write(
        i, tf.linalg.matvec(x, weights, transpose_a=True)
    )

  results = tf.TensorArray(
      tf.float64, size=num_blocks, infer_shape=False, element_shape=[None]
  )
  _, results = tf.while_loop(lambda i, _: i < num_blocks, body, (0, results))
  return center + tf.ensure_shape(results.concat(), [size])


def mix(values: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
  """Computes weighted means of rows.

  Args:
    values: Finite floats of shape `[n, d]`.
    weights: The weights of the rows in each mean, float64 of shape `[m, n]`,
      nonnegative, with a sum of 1 for each mean.

  Returns:
    Finite floats of shape `[m, d]`.
  """
  mixed = tf.matmul(tf.cast(weights, values.dtype), values)
  # Rounding can make means of the largest numbers infinite. The sums of the
  # rows are a cheap check.
  sums = tf.linalg.matvec(mixed, tf.ones([values.shape[1]], values.dtype))
  return tf.cond(
      tf.reduce_all(tf.math.is_finite(sums)),
      lambda: mixed,
      lambda: tf.clip_by_value(mixed, values.dtype.min, values.dtype.max),
  )


def mean(values: tf.Tensor) -> tf.Tensor:
  """Computes the mean of rows.

  Args:
    values: Finite floats of shape `[n, d]`, with n ≥ 1.

  Returns:
    Finite floats of shape `[d]`.
  """
  return mean_of_some(values, tf.ones([tf.shape(values)[0]], values.dtype))


def mean_of_some(values: tf.Tensor, are_included: tf.Tensor) -> tf.Tensor:
  """Computes the mean of some of the rows.

  Args:
    values: Finite floats of shape `[n, d]`.
    are_included: 1 for the rows to average, of which there is at least one, and
      0 for the others; of shape `[n]`, with the dtype of the values.

  Returns:
    Finite floats of shape `[d]`.
  """
  count = tf.reduce_sum(are_included)
  # A matrix product takes half the time of `tf.reduce_mean`.
  plain = tf.linalg.matvec(values, are_included, transpose_a=True) / count
  weights = tf.cast(are_included / count, tf.float64)[tf.newaxis]
  return tf.cond(
      # The sum is a cheap check.
      tf.math.is_finite(tf.reduce_sum(plain)),
      lambda: plain,
      # The sum of the rows overflowed.
      lambda: mix(values, weights)[0],
  )


def nearest(squared: tf.Tensor, num_nearest: tf.Tensor) -> tf.Tensor:
  """Marks the smallest entries of each row.

  Args:
    squared: Squared distances, `[n, n]`.
    num_nearest: The number of entries to mark in each row. Of equal entries,
      the first are marked.

  Returns:
    Booleans of shape `[n, n]`.
  """
  order = tf.argsort(squared, axis=1, stable=True)
  # `argsort` of a permutation is its inverse: the rank of each entry.
  return tf.argsort(order, axis=1) < num_nearest


def _centered_products(
    values: tf.Tensor, approximate: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Computes `middle_products`, given approximate squared distances."""
  radii = squared_radii(approximate)
  middle = tf.argmin(radii)
  center = tf.cast(tf.gather(values, middle), tf.float64)
  # If even the smallest ball is infinite, there is no known central row.
  is_known = tf.math.is_finite(tf.gather(radii, middle))
  center = tf.where(is_known, center, tf.zeros_like(center))
  products = _sum_over_blocks(
      values,
      center,
      lambda x: tf.matmul(x, x, transpose_b=True),
      [None, None],
  )
  return (products + tf.transpose(products)) / 2, center


def squared_radii(squared: tf.Tensor) -> tf.Tensor:
  """Computes the squared radius of a ball around each row with most rows in it.

  Args:
    squared: Squared distances, `[n, n]`.

  Returns:
    Shape `[n]`.
  """
  num_rows = tf.shape(squared)[0]
  return tf.sort(squared, axis=1)[:, tf.minimum(num_rows // 2, num_rows - 1)]


def from_products(products: tf.Tensor) -> tf.Tensor:
  """Computes squared distances of rows from their inner products.

  Args:
    products: The inner products, `[n, n]`.

  Returns:
    Distances of shape `[n, n]`; infinite where products overflowed, 0 on the
    diagonal.
  """
  lengths = tf.linalg.diag_part(products)
  squared = lengths[:, tf.newaxis] + lengths - 2 * products
  squared = tf.where(
      tf.math.is_nan(squared), tf.constant(float('inf'), squared.dtype), squared
  )
  return tf.linalg.set_diag(tf.maximum(squared, 0), tf.zeros_like(lengths))


def _products(values: tf.Tensor) -> tf.Tensor:
  """Computes inner products in the dtype of the values, as float64."""
  return tf.cast(tf.matmul(values, values, transpose_b=True), tf.float64)


def _is_accurate(
    products: tf.Tensor, squared: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
  """Returns whether more than half of each row's distances are accurate."""
  lengths = tf.linalg.diag_part(products)
  smallest = tf.maximum(_MIN_SHARE * lengths, float(dtype.max) ** -0.5)
  num_small = tf.math.count_nonzero(
      squared <= smallest[:, tf.newaxis], axis=1, dtype=tf.int32
  )
  return tf.math.is_finite(tf.reduce_sum(products)) & tf.reduce_all(
      num_small <= tf.shape(squared)[0] // 2
  )


def _squared_in_dtype(
    values: tf.Tensor, center: Optional[tf.Tensor] = None
) -> tf.Tensor:
  """Computes squared distances of rows from a point in the values' dtype.

  Args:
    values: Finite floats of shape `[n, d]`, with n ≥ 1.
    center: The point, of shape `[d]`, with the dtype of the values; `None` for
      the origin.

  Returns:
    float64 of shape `[n]`. Squares may overflow or underflow.
  """
  num_rows = tf.shape(values)[0]
  block_rows = max(_BLOCK_ELEMENTS // max(values.shape[1], 1), 1)

  def block(i):
    # Rows, unlike columns, can often be sliced without a copy.
    x = values[i * block_rows : (i + 1) * block_rows]
    if center is None:
      return tf.reduce_sum(tf.math.square(x), axis=1)
    return tf.reduce_sum(tf.math.squared_difference(x, center), axis=1)

  _, squared = tf.while_loop(
      lambda i, _: i * block_rows < num_rows,
      lambda i, squared: (i + 1, tf.concat([squared, block(i)], axis=0)),
      (1, block(0)),
      shape_invariants=(tf.TensorShape([]), tf.TensorShape([None])),
      # Limits the memory to two blocks.
      parallel_iterations=2,
  )
  return tf.cast(squared, tf.float64)


def _are_in_range(squared: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
  """Returns whether no result of `_squared_in_dtype` is out of range."""
  return tf.reduce_all(
      tf.math.is_finite(squared) & (squared >= _smallest_sum(values))
  )


def _smallest_sum(values: tf.Tensor) -> float:
  """Returns the least sum of squares of a row without underflow."""
  # Squares that underflow add up to less than this, relative to the rounding.
  return values.shape[1] * _tiny(values.dtype) / _epsilon(values.dtype)


def _tiny(dtype: tf.DType) -> float:
  return float(np.finfo(dtype.as_numpy_dtype).tiny)


def _epsilon(dtype: tf.DType) -> float:
  return float(np.finfo(dtype.as_numpy_dtype).eps)


def _num_blocks(values: tf.Tensor) -> int:
  return -(-values.shape[1] // _BLOCK_COLUMNS)


def _block(values: tf.Tensor, center: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
  """Returns a block of columns of the rows' differences from a point."""
  columns = slice(i * _BLOCK_COLUMNS, (i + 1) * _BLOCK_COLUMNS)
  x = tf.cast(values[:, columns], tf.float64) - center[columns]
  return tf.clip_by_value(x, -_LARGEST, _LARGEST)


def _sum_over_blocks(
    values: tf.Tensor,
    center: tf.Tensor,
    function: Callable[[tf.Tensor], tf.Tensor],
    shape: list[Any],
) -> tf.Tensor:
  """Sums a function of each block of columns."""
  num_blocks = _num_blocks(values)
  num_rows = tf.shape(values)[0]
  return tf.while_loop(
      lambda i, _: i < num_blocks,
      lambda i, total: (i + 1, total + function(_block(values, center, i))),
      (0, tf.zeros([num_rows] * len(shape), tf.float64)),
      shape_invariants=(tf.TensorShape([]), tf.TensorShape(shape)),
      # Limits the memory to one block.
      parallel_iterations=1,
  )[1]
