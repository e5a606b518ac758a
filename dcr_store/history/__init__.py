"""Questions about versions: resolve, read, diff, verify."""
