"""Sums of a round over a process group of `torch.distributed`: tensors and collectives, nothing else."""
