"""The tuner: see session.py. Nothing here is imported by a call."""
