"""The bytes of a client update, and the exact sum of many."""
