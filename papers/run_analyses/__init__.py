"""Analyses of position-aware neurons in finished runs."""
