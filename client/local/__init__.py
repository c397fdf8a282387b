"""Local training: what a site is asked to do in a round, its steps over its own data, and what it answers."""
