"""What training frameworks need beyond `torch.compile(model, backend="te")`, a module each; none is imported before it
is asked for."""
