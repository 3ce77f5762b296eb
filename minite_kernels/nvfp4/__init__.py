"""NVFP4: formats, layouts, recipes, quantizers, GEMMs and autograd modules."""
