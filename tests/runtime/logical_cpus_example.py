"""Clients on several logical CPUs, which only a new process can have.

Run as a program, this prints its results as one line of JSON.
"""

import hashlib
import json
import os
from unittest import mock

import rounds_at_once
import tensorflow as tf
import toy_problem

from tff_bn import runtime
from tff_bn.runtime import client_part
from tff_bn.runtime import portioning


def _outputs(uses_all_cpus):
  """Returns a digest of rounds, and the devices of their clients."""
  problem = toy_problem.Toy('float32', (6, 6, 1))
  process = rounds_at_once.process('build_fed_avg', problem.model())
  devices = set()
  call = client_part.ClientPart.call

  def noting_call(part, *args):
    outputs = call(part, *args)
    devices.update(output.device for output in outputs.values())
    return outputs

  with (
      mock.patch.object(portioning, '_MIN_COMPILED_CLIENTS', 2),
      mock.patch.object(portioning, '_COMPILED_CLIENTS', 2),
      mock.patch.object(
          portioning.Portioning, 'uses_all_cpus', return_value=uses_all_cpus
      ),
      mock.patch.object(client_part.ClientPart, 'call', noting_call),
      runtime.in_process_runtime(),
  ):
    outputs = rounds_at_once.outputs(
        process, rounds_at_once.equal_clients(problem, number=8)
    )
  values = tf.nest.flatten(outputs[-1].state.global_model_weights.trainable)
  digest = hashlib.sha256(b''.join(value.tobytes() for value in values))
  return digest.hexdigest(), sorted(device[-5:] for device in devices)


def main():
  os.sched_getaffinity = lambda _: {0, 1}
  runtime.divide_cores(100)
  print(json.dumps([_outputs(False), _outputs(True)]))


if __name__ == '__main__':
  main()
