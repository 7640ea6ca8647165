"""Low-precision copies of weights that outlive a call."""
