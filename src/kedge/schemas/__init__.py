"""JSON schemas of tools and of typed answers: how they are made from types, their strict form, and validation."""
