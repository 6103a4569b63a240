"""A client's work in a round: local training, drift corrections, moments."""
