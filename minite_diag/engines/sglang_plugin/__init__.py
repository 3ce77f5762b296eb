"""What has to live inside SGLang: its scheduler, the CPU's NVFP4 methods, hooks, layout, read-back.

Imports SGLang inside functions only, so that naming this package costs nothing. Invariant: no file
of SGLang is changed; what is put in the place of its functions goes through its plugin hooks.
"""
