"""Apps that were written for Flower: their ClientApp as a client of umbel, and the first model of their ServerApp.

Only `host.py`, `child.py` and `server_app.py` import flwr, which the extra `umbel[flower]` installs.
"""
