"""The HTTP API: routes, authentication, limits and connections."""
