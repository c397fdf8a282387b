"""Federated algorithms beyond FedAvg: what a client adds to its training, and what the server makes of it."""
