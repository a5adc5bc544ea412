"""KV memory as plain integers: pages, the shared prefix tree and the manager. No torch."""
