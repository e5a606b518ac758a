"""What a stretch of a line's history shows: figures gathered from log and deltas, and a page of them."""
