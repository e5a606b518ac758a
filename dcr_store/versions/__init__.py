"""Committed versions: finding one, the path to it, replaying it onto a target."""
