"""The signed account of a run, its auditor, and the replay of a round."""
