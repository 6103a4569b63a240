"""Runs for the tests of tables and plots."""

from tff_bn.programs.results import report

# Two seeds of an algorithm with a global model and one seed of an algorithm
# whose clients have their own models.
RUNS = [
    report.Run(
        {'algorithm': 'fedavg'},
        0,
        [
            dict(round=1, test_accuracy=0.1, test_loss=9.0, exchanges=1),
            dict(round=2, test_accuracy=0.5, test_loss=2.0, exchanges=2),
            dict(round=3, test_accuracy=0.7, test_loss=1.0, exchanges=3),
        ],
    ),
    report.Run(
        {'algorithm': 'fedavg'},
        1,
        [
            dict(round=1, test_accuracy=0.3, test_loss=9.0, exchanges=1),
            dict(round=2, test_accuracy=0.7, test_loss=3.0, exchanges=2),
            dict(round=3, test_accuracy=0.9, test_loss=2.0, exchanges=3),
        ],
    ),
    report.Run(
        {'algorithm': 'fedbn'},
        0,
        [
            dict(round=1, client_test_accuracy=0.25),
            dict(round=3, client_test_accuracy=0.75, client_test_loss=0.5),
        ],
    ),
]
