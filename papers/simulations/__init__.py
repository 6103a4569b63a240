"""Analyses that need no run: normalization errors, and FedBN's toy example."""
