"""Where a program runs its TFF computations, from its flags.

These flags say where a run is computed, not what: a run may be continued with
other ones. Importing this module imports no TensorFlow.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any, Optional

from tff_bn.programs import cli
from tff_bn.programs import flag_groups
from tff_bn.programs import parsers
from tff_bn.programs import settings


@dataclasses.dataclass(frozen=True)
class RuntimeSettings:
  """The flags of the group 'Runtime'.

  Attributes:
    runtime: The value of `--runtime`.
    client_devices: The TensorFlow devices for the clients; None: the default.
    ray: The arguments of `tff_bn.runtime.ray_runtime`.
  """

  runtime: str
  client_devices: Optional[tuple[str, ...]]
  ray: dict[str, Any]

  @contextlib.contextmanager
  def enter(self) -> Iterator[None]:
    """Runs TFF computations in this runtime for a `with` block.

    Yields:
      Nothing.

    Raises:
      ValueError: If there is no such device or cluster, or a worker can't be
        used.
      RuntimeError: If no worker is left.
    """
    # Imported late: it takes seconds.
    from tff_bn import runtime  # pylint: disable=g-import-not-at-top

    with contextlib.ExitStack() as stack:
      if self.runtime == 'native':
        stack.enter_context(runtime.native_runtime())
      elif self.runtime == 'ray':
        with _naming('runtime', self.runtime):
          stack.enter_context(runtime.ray_runtime(**self.ray))
      else:
        with _naming('client_devices', self.client_devices):
          stack.enter_context(
              runtime.in_process_runtime(client_devices=self.client_devices)
          )
      try:
        yield
      except runtime.WorkersLostError as error:
        raise RuntimeError(
            f'{error} The same command continues from the last checkpoint.'
        ) from error


@contextlib.contextmanager
def _naming(name: str, value: Any) -> Iterator[None]:
  """Adds to an error which flag can't be as it is."""
  try:
    yield
  except ValueError as error:
    raise ValueError(
        f'--{name}={parsers.to_text(value)} is impossible. {error}'
    ) from error


def resolve(flags: cli.ParsedFlags) -> RuntimeSettings:
  """Checks the flags against one another.

  Args:
    flags: The flags of `tff-bn-train` or `tff-bn-compare`.

  Returns:
    The settings.

  Raises:
    ValueError: If flags contradict one another.
  """
  if flags.runtime != 'in_process':
    settings.refuse_unless_overruled(
        flags,
        'client_devices',
        'runtime',
        'is only for --runtime=in_process: workers choose their own devices',
    )
  if flags.runtime != 'ray':
    for name in flag_groups.RAY_FLAGS:
      settings.refuse_unless_overruled(
          flags, name, 'runtime', 'is only for --runtime=ray'
      )
  # Never overruled: it is a part of what is computed.
  if flags.runtime == 'native' and flags.jit_compile:
    raise ValueError(
        '--jit_compile is only for --runtime=in_process and --runtime=ray,'
        " because TFF's worker process, which has no XLA compiler, would"
        ' ignore it.'
    )
  is_ray = flags.runtime == 'ray'
  return RuntimeSettings(
      flags.runtime,
      flags.client_devices if flags.runtime == 'in_process' else None,
      {
          argument: getattr(flags, name)
          for name, argument in flag_groups.RAY_FLAGS.items()
          if is_ray
      },
  )
