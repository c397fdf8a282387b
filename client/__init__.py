"""The SDK that runs where the data is."""
