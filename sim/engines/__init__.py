"""How the clients of a simulated cohort train: one after another, all at once, or over processes and machines."""
