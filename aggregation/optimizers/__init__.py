"""Server optimizers: how the mean change of a round moves the model, and what is remembered for the next round."""
