"""What has to live inside vLLM: the loader, the CPU's NVFP4 kernels, hooks, layout, read-back.

Imports vLLM inside functions only, so that naming this package costs nothing. Invariant: what vLLM
offers a public registration for is registered; what it doesn't is kept in `nvfp4_cpu` behind a
version check.
"""
