"""Analyses of what algorithms reveal about the clients."""
