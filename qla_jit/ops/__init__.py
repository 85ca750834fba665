"""The documented operations."""
