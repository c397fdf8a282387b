"""One federated round: its states and their machine, the cohort, the weights, and the next attempt."""
