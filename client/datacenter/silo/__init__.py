"""One client of several ranks: a torchrun group (DDP, FSDP2, stages of a pipeline) that takes part in a run."""
