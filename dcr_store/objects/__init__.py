"""Object stores that satisfy ``ports.ObjectStore``: a directory, memory, S3. Refuses every other protocol."""
