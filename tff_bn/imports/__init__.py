"""What Python imports: dependencies, TFF on today's Python, parts on demand."""
