"""What the package has to offer, one entry each. Imports no TensorFlow."""
