"""Hyper-parameter search over recipes."""
