"""Maintenance of a store's history: anchors, folds, expiry, collection, names (docs/spec/v1.md §14)."""
