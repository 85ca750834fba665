"""The documented operations, and the steps from their arguments to their kernels."""
