"""The codecs that write an update as a vector: one file each."""
