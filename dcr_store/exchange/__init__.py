"""Versions into and out of a store: copies of stores, folders of checkpoints, delta directories of other systems."""
