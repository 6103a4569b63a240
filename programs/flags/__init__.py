"""The flags of the programs, in groups."""
