"""Device code: one file per kernel template, and what each says of itself. Imports nothing from its callers."""
