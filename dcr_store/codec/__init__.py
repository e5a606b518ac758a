"""Bits to bytes: chunk encoding, the Zarr codec, linear digests. Pure: no I/O."""
