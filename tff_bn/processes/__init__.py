"""Learning processes: their composition and the server's step."""
