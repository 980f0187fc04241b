"""What the Triton halves of the formats share; imported to build kernels, never to plan."""
