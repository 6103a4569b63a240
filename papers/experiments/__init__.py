"""The papers' experiments: their files, and what the programs do with them."""
