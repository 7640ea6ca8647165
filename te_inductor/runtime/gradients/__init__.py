"""What takes weight gradients in autograd's place: fp32 totals, and tickets of gradients that wait."""
