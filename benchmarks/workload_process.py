"""Runs a public workload with one framework, for `public_workloads`.

    python workload_process.py FRAMEWORK WORKLOAD

`WORKLOAD` is the JSON text of a `workload_data.Workload`. The interpreter needs
NumPy and the framework. The process trains in turns, see `workload_data.Turns`.
"""

import importlib
import sys

import workload_data

# The module and the function of each framework.
FRAMEWORKS = {
    'tff_bn': ('workload_tensorflow', 'run_tff_bn'),
    'keras': ('workload_tensorflow', 'run_keras'),
    'pytorch': ('workload_pytorch', 'run_loop'),
    'pfl': ('workload_pytorch', 'run_pfl'),
    'pfl2': ('workload_pytorch', 'run_two_pfl'),
    'flower': ('workload_pytorch', 'run_flower'),
    'jax': ('workload_jax', 'run'),
}


def main() -> None:
  """Runs the workload."""
  _, framework, text = sys.argv
  module, function = FRAMEWORKS[framework]
  turns = workload_data.Turns()
  run = getattr(importlib.import_module(module), function)
  run(workload_data.Workload.from_json(text), turns)


if __name__ == '__main__':
  main()
