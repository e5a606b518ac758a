"""The command ``dcr``: one module per group of verbs, arguments, output and rendering apart.

Modules here import argparse and the errors at most; a verb imports what it needs when it runs, so that ``dcr log``
starts in a blink.
"""
