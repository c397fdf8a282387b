"""The mathematics and the protocols of federated rounds: pure, no I/O, no clock, no global randomness."""
