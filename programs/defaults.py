"""The default experiment: what the programs do when a flag isn't given.

The numbers are chosen so that `tff-bn-compare` without any flag shows, within
minutes on two processor cores, what batch normalization does to federated
learning on clients with different labels.
"""

ALGORITHM = 'fedavg'
ALGORITHMS = (
    'centralized',
    'fedavg',
    'fedbn',
    'silobn',
    'fedtan',
    'fedtan_forward_only',
    'fedtan_ii',
    'fbn',
    'fixbn',
)
SEED = 0
SEEDS = (0, 1)

DATASET = 'digits'
SPLIT = 'classes'
NUM_CLIENTS = 10  # unless the split says how many there are
CLASSES_PER_CLIENT = 1  # with --split=classes
DIRICHLET_ALPHA = 0.5  # with --split=dirichlet
GAMMA = 0.1  # with --split=gamma
IMBALANCE = 1.0  # with --split=unbalanced

MODEL = 'small_cnn'
NORMALIZATION = 'batch'
PRECISION = 'float32'

PAN = 'off'
PAN_PERIOD = 1.0
PAN_PERSONAL_SHARE = 0.0
# As in FedPAN's paper.
PAN_AMPLITUDE = {'add': 0.05, 'multiply': 0.1}

ROUNDS = 60
LOCAL_STEPS = 5
BATCH_SIZE = 32
CLIENT_LEARNING_RATE = 0.1
CLIENT_MOMENTUM = 0.0
CLIENT_WEIGHT_DECAY = 0.0
CLIENT_WARMUP_STEPS = 0
MAX_FAILED_ROUNDS = 10
CLIENT_WEIGHTING = 'num_examples'
STATISTICS = 'naive'
MOMENTS = 'two_pass'
# The paper's are 10 to 40 % of the rounds, and 0.02 on CIFAR-10, 0.1 on MNIST.
SYNC_SHARE = 0.2
AFTER_SYNC_FACTOR = 0.1
# As in FBN's paper, where it is 1500 of 3000.
FIXBN_SHARE = 0.5

PROXIMAL_STRENGTH = 1e-3
FEDBS_EPSILON = 0.01
# As in MOON's paper.
MOON_WEIGHT = 1.0
MOON_TEMPERATURE = 0.5

MODEL_AGGREGATOR = 'mean'
STATISTICS_AGGREGATOR = 'mean'
CLIPPING_RADIUS = 10.0  # with centered_clipping
BUCKET_SIZE = 2  # with bucketing
ATTACK_TARGET = 'both'
# With None the attack itself says; the others have no strength. That of the
# Gaussian noise is from Blanchard et al. 2017.
ATTACK_STRENGTH = {'foe': 3.0, 'alie': None, 'ipm': 0.5, 'gaussian': 200.0}

SERVER_OPTIMIZER = 'sgd'
SERVER_LEARNING_RATE = {'sgd': 1.0, 'sgdm': 0.1, 'adam': 0.01, 'yogi': 0.01}
SERVER_MOMENTUM = 0.9  # with --server_optimizer=sgdm

EVALUATE_EVERY = 5
CHECKPOINT_EVERY = 10
AVERAGE_LAST = 5

TRAIN_OUTPUT_DIR = 'runs/train'
COMPARE_OUTPUT_DIR = 'runs/compare'

RUNTIME = 'in_process'
RAY_ADDRESS = 'local'
WORKER_TIMEOUT = 300.0
