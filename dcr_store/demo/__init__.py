"""The demonstration: a small policy learns, publishes every step, and its rollouts come from another process.

The trainer and the follower share nothing but the store, in one direction, and the follower's rollouts, in the other.
Uses ``dcr_store`` as its users do, through ``create`` and ``open`` alone. torch and transformers (extra ``demo``) are
imported when the demonstration runs, never before.
"""
