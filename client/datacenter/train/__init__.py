"""`umbel train`: a run file, carried out by the ranks of one job."""
