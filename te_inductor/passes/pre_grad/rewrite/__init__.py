"""How the sites that run are rewritten."""
