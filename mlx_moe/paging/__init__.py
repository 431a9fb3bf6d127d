"""Where experts and n-gram rows are, and how they get to the kernels."""
