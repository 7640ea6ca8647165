"""What users call: `te_inductor/__init__.py` exports it."""
