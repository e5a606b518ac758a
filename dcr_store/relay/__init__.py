"""An HTTP server through which a store is read by many at the cost of one (docs/spec/relay.md)."""
