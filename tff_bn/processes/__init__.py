"""Learning processes: how they are composed, and what the server does."""
