"""The training loop and the files of a run, see `loop`.

The names below are imported on first use.
"""

from tff_bn.imports import lazy

# Name -> the module of this package in which it is defined.
_MEMBERS = {
    'DetailedReport': 'detailed_reports',
    'HookedRun': 'metrics_hook',
    'KeptStatisticsWarning': 'kept_statistics',
    'MAY_CHANGE': 'training_config',
    'MetricsHookError': 'metrics_hook',
    'TooManyFailedRoundsError': 'training_config',
    'TrainingConfig': 'training_config',
    'TrainingFailedError': 'training_config',
    'TrainingResult': 'training_config',
    'UnusableModelError': 'training_config',
    'detailed_report': 'detailed_reports',
    'is_finished': 'finished',
    'train': 'loop',
}

__all__ = sorted(_MEMBERS)

__getattr__, __dir__ = lazy.attach(__name__, _MEMBERS)
