"""The manifest log of a line: fold (pure), append (conditional), checkpoints."""
