"""Configuration: one table of settings, and where each value comes from."""
