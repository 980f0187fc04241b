"""What the command line can do: one module an action, each with ``run(spec, output) -> int``."""
