"""FlashInfer behind the backend contract: which kernels, their plans, their calls.

``choose`` and ``sizes`` are pure and serve planning; everything else runs after the build.
"""
