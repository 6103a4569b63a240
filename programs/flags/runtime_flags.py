"""Where a program runs its TFF computations, from its flags.

These flags say where a run is computed, not what: a run may be continued with
other ones. Importing this module imports no TensorFlow.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import re
from typing import Any

from tff_bn.catalog import options
from tff_bn.catalog import parts
from tff_bn.catalog import value_types
from tff_bn.catalog.options import Option
from tff_bn.programs.cli import flag_groups
from tff_bn.programs.cli import parsers
from tff_bn.programs.cli.parsed_flags import ParsedFlags

# More than the workers and the cores of any cluster.
_COUNT = value_types.Number(int, minimum=1, maximum=10**5)
# 30 years; Python cannot wait for more than 300.
_SECONDS = value_types.Number(float, above=0, maximum=10**9)
RUNTIMES = {
    'in_process': "this program's own TensorFlow, on its CPU or GPUs",
    'ray': 'workers of a Ray cluster, on one or several machines',
    'native': "TensorFlow Federated's worker process, on the CPU",
}


def _check_device(name: str) -> None:
  if not re.fullmatch(r'(/\S*)?\w+:[0-9]+', name):
    raise ValueError('must be a device such as CPU:0 or GPU:1.')


# Declares an option of an argument of `tff_bn.runtime.ray_runtime`.
_ray_option = functools.partial(
    Option,
    argument=options.OWN_NAME,
    conditions=(options.only_for('runtime', 'ray'),),
)

_OPTIONS = (
    Option(
        'runtime',
        value_types.Choice(RUNTIMES),
        'What runs the federated computations:\n' + parts.listing(RUNTIMES),
        'in_process',
    ),
    Option(
        'client_devices',
        value_types.List(value_types.CheckedText(_check_device)),
        'TensorFlow devices on which clients are computed, separated by commas,'
        ' such as GPU:0,GPU:1. Only with --runtime=in_process',
        default_text='all GPUs, or the CPU if there is none',
        conditions=(
            options.Condition(
                'runtime',
                lambda flags: flags.runtime == 'in_process',
                'is only for --runtime=in_process: workers choose their own'
                ' devices',
            ),
        ),
    ),
    _ray_option(
        'ray_address',
        value_types.TEXT,
        'The Ray cluster. auto or HOST:PORT: a cluster to which this machine'
        ' belongs; local: a cluster of this machine alone, which ends with the'
        ' program. This and the following flags are only for --runtime=ray',
        'local',
        argument='address',
    ),
    _ray_option(
        'num_workers',
        _COUNT,
        'Number of processes that compute clients',
        default_text='as many as the cluster has room for, also when machines'
        ' join',
    ),
    _ray_option(
        'cpus_per_worker',
        _COUNT,
        'Number of cores that Ray reserves for a worker',
        default_text="1 with a GPU, else an operation's, at most half of this"
        " machine's",
    ),
    _ray_option(
        'gpus_per_worker',
        value_types.SHARE,
        'Number of GPUs that Ray reserves for a worker; with 0.5 two workers'
        ' share one',
        default_text='1 if the cluster has GPUs, else 0',
    ),
    _ray_option(
        'client_timeout',
        _SECONDS,
        'Seconds after which a client is given to a second worker too; the'
        ' first result is used',
        default_text='none',
    ),
    _ray_option(
        'worker_timeout',
        _SECONDS,
        'Seconds without any worker after which the program ends; the same'
        ' command continues from the last checkpoint',
        300.0,
    ),
)


@dataclasses.dataclass(frozen=True)
class RuntimeFlags(flag_groups.base_class(*_OPTIONS)):  # type: ignore[misc]
  """The runtime, and the devices or machines that it uses."""

  TITLE = 'Runtime'

  @classmethod
  def check(cls, flags: ParsedFlags) -> None:
    """See `Flags.check`."""
    super().check(flags)
    # Never overruled: it changes the results.
    if flags.runtime == 'native' and flags.jit_compile:
      raise ValueError(
          '--jit_compile is only for --runtime=in_process and --runtime=ray,'
          " because TFF's worker process, which has no XLA compiler, would"
          ' ignore it.'
      )

  @contextlib.contextmanager
  def enter(self) -> Iterator[None]:
    """Runs TFF computations in this runtime for a `with` block.

    Raises:
      ValueError: If there is no such device or cluster, or a worker can't be
        used.
      RuntimeError: If no worker is left.
    """
    # Imported late: it takes seconds.
    from tff_bn import runtime

    with contextlib.ExitStack() as stack:
      if self.runtime == 'native':
        stack.enter_context(runtime.native_runtime())
      elif self.runtime == 'ray':
        with _naming('runtime', self.runtime):
          stack.enter_context(runtime.ray_runtime(**self.arguments()))
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
