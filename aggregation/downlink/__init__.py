"""What clients download where they are sent changes of a model instead of the whole model."""
