"""Producing a version: baseline, change detection, the transaction writer, commit and resume."""
