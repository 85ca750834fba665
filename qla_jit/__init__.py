"""JIT kernel compiler and autotuner for Gated Delta Network linear attention."""
