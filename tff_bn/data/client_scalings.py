"""Each client's statistics of its images, which scale images (FedRDN).

Yan et al., A Simple Data Augmentation for Feature Distribution Skewed Federated
Learning, CVPR 2025, arXiv:2306.09363.
"""

from collections.abc import Mapping
import dataclasses
import functools

import numpy as np

from tff_bn.data import dataset as dataset_lib


@dataclasses.dataclass(frozen=True, eq=False)
class ClientScalings:
  """The scaling of each client, and whether training draws one for each image.

  Attributes:
    by_client: Client id -> the client's own scaling.
    are_drawn: Whether each training image gets the scaling of a random client.
      Otherwise, it gets the scaling of its own client.
  """

  by_client: Mapping[str, dataset_lib.Scaling]
  are_drawn: bool = True

  def mean(self) -> dataset_lib.Scaling:
    """Returns the mean over the clients, for a model that has no client."""
    means, deviations = self._stacked
    return dataset_lib.Scaling(means.mean(0), deviations.mean(0))

  def draw(
      self, num_images: int, rng: np.random.Generator
  ) -> dataset_lib.Scaling:
    """Draws a client for each image, all with the same probability.

    Args:
      num_images: The number of images.
      rng: Determines the clients.

    Returns:
      A scaling whose arrays have the shape `[num_images, 1, 1, channels]`. The
      mean and the deviation of an image are from the same client.
    """
    chosen = rng.integers(len(self.by_client), size=num_images)
    means, deviations = (x[chosen, None, None] for x in self._stacked)
    return dataset_lib.Scaling(means, deviations)

  def to_json(self) -> dict[str, dict[str, list[float]]]:
    """Returns the exact numbers, for a file."""
    return {c: scaling.to_json() for c, scaling in self.by_client.items()}

  @functools.cached_property
  def _stacked(self) -> tuple[np.ndarray, np.ndarray]:
    scalings = self.by_client.values()
    return (
        np.stack([scaling.mean for scaling in scalings]),
        np.stack([scaling.deviation for scaling in scalings]),
    )
