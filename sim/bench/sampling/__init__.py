"""`umbel bench sampling`: the errors of a round's mean change, by how its clients are drawn and weighted."""
