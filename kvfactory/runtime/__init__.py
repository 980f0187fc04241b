"""What a cache does between open and close: steps, layers, graphs, retraction."""
