"""The state of delayed scaling: where it is kept, which quantizer has it, and how a call brings it into a graph."""
