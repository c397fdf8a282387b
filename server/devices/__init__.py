"""Enrolled clients: who may speak, who waits for work, and who is fit for it."""
