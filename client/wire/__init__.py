"""How a client talks to the coordinator over HTTP."""
