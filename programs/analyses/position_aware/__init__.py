"""Analyses of position-aware neurons: what the units of trained models do."""
