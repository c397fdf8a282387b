"""Training inside a data center: the ranks of a torchrun job are clients, and a process group adds up their work."""
