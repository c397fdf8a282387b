"""Apps that were written for Flower: their ClientApp as a client of umbel, and the first model of their ServerApp.

`codec/` is for Flower alone: umbel's compression as a mod and a strategy. What imports flwr, which the extra
`umbel[flower]` installs, is listed in pyproject.toml.
"""
