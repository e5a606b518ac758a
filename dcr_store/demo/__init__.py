"""The demonstration: a small policy learns, publishes every step, and its rollouts come from other processes.

The trainer and its receivers share nothing but the store, in one direction, and the rollouts, in the other. Receivers
are killed and cut off on the way, and a reference run that has no store learns the same numbers. Uses ``dcr_store`` as
its users do. torch, transformers and aiohttp (extra ``demo``) are imported when the demonstration runs, never before.
"""
