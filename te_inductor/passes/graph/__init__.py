"""What passes of several stages ask of a graph."""
