"""Where a program runs its TFF computations, from its flags.

These flags say where a run is computed, not what: a run may be continued with
other ones. Importing this module imports no TensorFlow.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Optional

from tff_bn.programs import cli
from tff_bn.programs import parsers
from tff_bn.programs import settings


@dataclasses.dataclass(frozen=True)
class RuntimeSettings:
  """The flags of the group 'Runtime'.

  Attributes:
    runtime: The value of `--runtime`.
    client_devices: The TensorFlow devices for the clients; None: the default.
    cluster: The workers, `host:port`; None: this machine alone.
    on_worker_loss: The value of `--on_worker_loss`.
  """

  runtime: str
  client_devices: Optional[tuple[str, ...]]
  cluster: Optional[tuple[str, ...]]
  on_worker_loss: str

  @contextlib.contextmanager
  def enter(self) -> Iterator[None]:
    """Runs TFF computations in this runtime for a `with` block.

    Yields:
      Nothing.

    Raises:
      ValueError: If there is no such device, or a worker can't be used.
      RuntimeError: If a worker was lost and the program can't go on.
    """
    # Imported late: it takes seconds.
    from tff_bn import runtime  # pylint: disable=g-import-not-at-top

    if self.runtime == 'native':
      with runtime.native_runtime():
        yield
      return
    with contextlib.ExitStack() as stack:
      try:
        stack.enter_context(
            runtime.in_process_runtime(
                client_devices=self.client_devices,
                cluster=self.cluster,
                on_worker_loss=self.on_worker_loss,
            )
        )
      except ValueError as error:
        raise ValueError(f'{self._flag()} is impossible. {error}') from error
      try:
        yield
      except runtime.WorkerLostError as error:
        raise RuntimeError(
            f'{error} The same command, with the workers that are left in'
            ' --cluster, continues from the last checkpoint.'
        ) from error

  def _flag(self) -> str:
    """The flag that decides about the devices."""
    name = 'client_devices' if self.cluster is None else 'cluster'
    return f'--{name}={parsers.to_text(getattr(self, name))}'


def resolve(flags: cli.ParsedFlags) -> RuntimeSettings:
  """Checks the flags against one another.

  Args:
    flags: The flags of `tff-bn-train` or `tff-bn-compare`.

  Returns:
    The settings.

  Raises:
    ValueError: If flags contradict one another.
  """
  client_devices, cluster = flags.client_devices, flags.cluster
  if cluster is None:
    settings.refuse_unless_overruled(
        flags, 'on_worker_loss', 'cluster', 'is only for --cluster'
    )
  if flags.runtime == 'native':
    settings.refuse_unless_overruled(
        flags,
        'client_devices',
        'runtime',
        "is only for --runtime=in_process: with --runtime=native TFF's worker"
        ' process computes on its own CPU',
    )
    settings.refuse_unless_overruled(
        flags, 'cluster', 'runtime', 'is only for --runtime=in_process'
    )
    client_devices, cluster = None, None
    # Never overruled: it is a part of what is computed.
    if flags.jit_compile:
      raise ValueError(
          '--jit_compile is only for --runtime=in_process: with'
          " --runtime=native TFF's worker process, which has no XLA compiler,"
          ' would ignore it.'
      )
  return RuntimeSettings(
      flags.runtime,
      client_devices,
      cluster,
      flags.on_worker_loss,
  )
