"""`umbel bench`: ours against peers, plain baselines and physical limits, in one run."""
