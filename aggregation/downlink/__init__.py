"""What clients download in a run that sends changes of the model instead of whole models."""
