"""Runs: their folders, how they are built, and the jobs that train them."""
