"""The ranks of one torchrun job: how they find each other, what is the same on all, what torch says of a lost one."""
