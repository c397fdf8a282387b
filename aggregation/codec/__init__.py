"""How a weight change becomes few bytes: rotation, quantization, entropy coding, and codecs made of them."""
