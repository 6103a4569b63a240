"""A trap in batches as arrays, for the tests of Ray, which workers import."""

import array_data
import ray_example


class ArraysTrap(array_data.Client):
  """A trap for the process that loads a client's batches as arrays."""

  def __init__(self, client, path, signal_number=None, seconds=0):
    """Initializes the dataset; see `ray_example.Trap`."""
    super().__init__(client.problem, client.samples, client.sizes)
    self._trap = path, signal_number, seconds

  def arrays(self):
    def load():
      ray_example.spring(*self._trap)
      return self.samples

    return super().arrays()._replace(load=load)
