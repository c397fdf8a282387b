"""How a data set is dealt out to clients."""
