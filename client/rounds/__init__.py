"""What a client does in a round: train, measure, take part in secure aggregation, report."""
