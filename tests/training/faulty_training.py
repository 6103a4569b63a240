"""Trains again and again, each time with another fault of the disk.

Run as a program under LD_PRELOAD=file_faults.so, with a folder and a JSON list
of `[name, kind, number, count]`, see file_faults.c. Each training is in a child
process, so that imports are made once. Prints a JSON object for each: its exit
status, what it said, and how many operations it made.
"""

import ctypes
import json
import os
import sys
import traceback

import training_fakes

from tff_bn import training

CONFIG = training.TrainingConfig(
    rounds=3,
    batch_size=4,
    local_steps=1,
    clients_per_round=2,
    evaluate_every=2,
    checkpoint_every=1,
)


def in_child(run_dir, kind, number, count):
  """Trains in a child process with a fault."""
  reading, writing = os.pipe()
  child = os.fork()
  if not child:
    os.close(reading)
    text, faults = '', ctypes.CDLL(None)
    faults.file_faults_arm(os.fsencode(run_dir), kind, number, count)
    try:
      model = training_fakes.build_model()
      training_fakes.train(model, run_dir, CONFIG, stateful=True)
    except Exception as error:  # pylint: disable=broad-except
      text = f'{type(error).__name__}: {error}'
      traceback.print_exc()
    made = faults.file_faults_count()
    with os.fdopen(writing, 'w') as pipe:
      json.dump(dict(text=text, operations=made), pipe)
    os._exit(bool(text))
  os.close(writing)
  with os.fdopen(reading) as pipe:
    said = pipe.read()
  _, status = os.waitpid(child, 0)
  result = json.loads(said) if said else dict(text='', operations=None)
  return dict(result, status=os.waitstatus_to_exitcode(status))


def main(folder, faults):
  for name, *fault in json.loads(faults):
    result = in_child(os.path.join(folder, name), *fault)
    print(json.dumps(dict(result, name=name)), flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
