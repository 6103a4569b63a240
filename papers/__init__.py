"""The five papers' experiments, and the analyses that only they need."""
