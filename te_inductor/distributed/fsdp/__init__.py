"""FSDP2 that gathers weights in low precision."""
