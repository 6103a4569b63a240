"""A Keras model as data: its variables with their roles, and its functions."""
