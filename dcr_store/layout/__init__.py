"""Canonical coordinates: dtypes, bit views of tensors, the table of tensors and their addresses. Pure: no I/O."""
