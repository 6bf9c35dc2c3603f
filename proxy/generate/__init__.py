"""Token ids -> token ids: engine clients, and the pool that chooses among them."""
