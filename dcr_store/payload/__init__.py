"""The payload of one version: partitions, digest tables, contributions, and how they are read and written."""
