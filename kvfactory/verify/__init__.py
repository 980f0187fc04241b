"""A run against its reference: attention, sparse index, state."""
