"""`umbel doctor --distributed`: whether the ranks of a job agree, what their network can do, and what limits a job."""
