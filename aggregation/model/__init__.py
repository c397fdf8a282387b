"""A model as one vector and as a safetensors file."""
