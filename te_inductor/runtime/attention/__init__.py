"""Attention whose mask is a predicate: as plain data, on blocks of scores, and computed."""
