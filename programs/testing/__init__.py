"""Tests of trained models: evaluations, new clients and model files."""
