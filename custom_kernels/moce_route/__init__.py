"""Expert routing: from router logits to expert ids and mixing weights."""

from custom_kernels.moce_route.reference import naive_route as moce_route

__all__ = ["moce_route"]
