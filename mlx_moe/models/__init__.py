"""Model definitions. They import only the configuration, the caches and the kernels; they do no I/O."""
