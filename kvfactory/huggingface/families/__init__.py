"""One module per group of related families; each lists its own in ``PLUGINS``."""
