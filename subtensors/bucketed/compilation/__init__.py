"""A bucketed program as compiled code: one compilation for all of its buckets, with and without its gradients."""
