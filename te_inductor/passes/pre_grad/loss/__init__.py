"""Output layers whose logits a loss reads, and nothing else: Note [Loss of chunks] in runtime/eager/losses.py."""
