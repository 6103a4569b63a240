"""The training loop, and what a run writes: see `loop`.

The names below are imported when they are first used.
"""

from tff_bn.imports import lazy

__all__ = [
    'MAY_CHANGE',
    'TooManyFailedRoundsError',
    'TrainingConfig',
    'TrainingFailedError',
    'TrainingResult',
    'UnusableModelError',
    'is_finished',
    'train',
]

__getattr__, __dir__ = lazy.attach(__name__, dict.fromkeys(__all__, 'loop'))
