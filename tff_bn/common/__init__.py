"""Small helpers that depend on no other room."""
