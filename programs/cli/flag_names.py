"""Suggests a flag for an unknown name."""

from collections.abc import Collection, Mapping
import types

from tff_bn.common import spelling

# Flag -> its usual names in other packages.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        'algorithm': ('algo', 'method', 'strategy'),
        'algorithms': ('algo', 'algos', 'method', 'methods', 'strategy'),
        'augment': ('augmentation', 'data_augmentation'),
        'batch_norm_momentum': ('bn_momentum',),
        'batch_size': ('batch', 'bs', 'train_batch_size', 'local_bs'),
        'checkpoint_every': ('save_every', 'save_freq', 'checkpoint_freq'),
        'client_gradient_clip_norm': (
            *('clip', 'clip_norm', 'clipnorm', 'grad_clip', 'gradient_clip'),
            *('gradient_clip_norm', 'max_grad_norm'),
        ),
        'client_learning_rate': ('lr', 'client_lr', 'local_lr', 'step_size'),
        'client_learning_rate_schedule': (
            'schedule',
            'scheduler',
            'lr_schedule',
        ),
        'client_optimizer': ('opt', 'optim'),
        'client_weight_decay': ('wd', 'decay', 'l2'),
        'clients_per_round': (
            *('frac', 'fraction', 'fraction_fit', 'participation'),
            *('num_sampled_clients', 'sampled_clients', 'sample_rate'),
        ),
        'data_dir': ('data_path', 'data_root', 'datadir'),
        'dataset': ('data', 'dataset_name'),
        'dirichlet_alpha': ('alpha', 'dirichlet'),
        'evaluate_every': ('eval_every', 'eval_freq', 'test_every'),
        'image_size': ('img_size', 'resize'),
        'jit_compile': ('jit', 'xla'),
        'jobs': ('n_jobs', 'parallel'),
        'local_epochs': ('epoch', 'n_epochs', 'num_epochs', 'num_local_epochs'),
        'local_steps': ('num_steps', 'num_local_steps', 'iterations'),
        'model': ('arch', 'architecture', 'backbone', 'model_name', 'net'),
        'model_aggregator': ('aggregation', 'aggregator', 'defense', 'rule'),
        'normalization': ('norm', 'norm_layer'),
        'num_attackers': ('malicious', 'num_malicious'),
        'num_clients': ('n_clients', 'num_users', 'parties', 'users'),
        'output_dir': (
            *('out', 'out_dir', 'outdir', 'output', 'log_dir', 'logdir'),
            *('result_dir', 'results_dir', 'save_dir'),
        ),
        'overwrite': ('force', 'restart'),
        'precision': ('amp', 'dtype', 'fp16', 'mixed_precision'),
        'proximal_strength': ('mu', 'prox_mu', 'fedprox_mu'),
        'rounds': (
            *('round', 'n_rounds', 'num_rounds', 'comm_round', 'comm_rounds'),
            *('communication_rounds', 'global_epochs', 'global_rounds'),
        ),
        'run': ('checkpoint', 'model_dir', 'path', 'run_dir'),
        'seed': ('random_seed', 'random_state'),
        'seeds': ('random_seed', 'random_state'),
        'server_learning_rate': ('global_lr', 'server_lr', 'slr'),
        'split': ('distribution', 'partition', 'partitioning'),
        'verbosity': ('log_level', 'loglevel', 'quiet', 'verbose'),
    }
)
# Prefixes that users often leave out, the most frequent first: `learning_rate`
# usually means the clients' rate, not the server's.
_PREFIXES = ('', 'client_', 'local_', 'num_')


def suggestion(name: str, known: Collection[str]) -> str:
  """Returns `' Did you mean …?'` for an unknown name of a flag, or `''`."""
  name = name.lower().replace('-', '_')
  meant = [prefix + name for prefix in _PREFIXES]
  meant += [flag for flag, others in _OTHER_NAMES.items() if name in others]
  for flag in meant:
    if flag in known:
      return f' Did you mean {flag}?'
  return spelling.suggestion(name, known)
