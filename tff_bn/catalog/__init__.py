"""What there is, said once: options, parts and columns, each with its entry.

The library reads arguments' ranges and the lists of its parts from here, the
programs their flags with help and errors, and the documentation its tables.
Nothing here imports TensorFlow, so wrong flags are found at once.
"""
