"""Local training: the ready trainer, its data, its metrics and its device."""
