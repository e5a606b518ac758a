"""The JSON side of docs/spec: names, keys, records, documents and their validation. Pure: no I/O."""
