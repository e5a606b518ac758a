"""Bringing a target to a version: paths, replay by chunks, healing, pull into a directory."""
