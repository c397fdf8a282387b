"""Data sets, and how one is split over many clients: what each of them holds."""
