"""The op set on real tensors, in plain torch: what runs when a graph runs uncompiled, and when a lowering cannot."""
