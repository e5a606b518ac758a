"""Weights into a live engine through its own ``load_weights``: masks travel the loader's way and are XORed in."""
