"""A runtime whose clients run on the workers of a Ray cluster."""
