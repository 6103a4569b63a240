"""A traced function cut at batch normalization, with exchanges in between."""
