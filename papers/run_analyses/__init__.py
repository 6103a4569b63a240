"""Analyses of the models of finished runs, for the FedPAN paper."""
