"""Small helpers that import no other part of the package."""
