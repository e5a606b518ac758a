"""Weights into a live engine through its own ``load_weights``: masks travel the loader's way and are XORed in.

Its modules need torch; this one does not import them.
"""
