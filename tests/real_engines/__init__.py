"""Loaders of real engines, too large for the tests of every day: ``tools/test --engines`` runs them, pytest never does.

No module here has a name that pytest collects, and none is imported by what it does collect.
"""
