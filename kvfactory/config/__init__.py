"""Where a configuration comes from: folders of YAML, overrides, the device at hand."""
