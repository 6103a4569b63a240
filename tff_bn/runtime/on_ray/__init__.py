"""Clients that are computed by the workers of a Ray cluster."""
