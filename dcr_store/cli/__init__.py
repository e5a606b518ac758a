"""The command ``dcr``."""
