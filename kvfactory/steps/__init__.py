"""Steps: what a batch reads and writes, sent in one copy, its index made on the device."""
