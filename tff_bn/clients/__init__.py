"""What a client does in a round: local training, drift corrections, moments."""
