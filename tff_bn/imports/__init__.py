"""Import hooks, version checks and lazy imports."""
