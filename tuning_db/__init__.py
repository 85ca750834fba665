"""Tuned records that ship with the package: one JSON file per (arch, op family)."""
