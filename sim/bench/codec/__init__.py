"""`umbel bench codec`: errors, bytes and time of the codecs."""
