"""Reports, as data and as people read them: tables as wide as the terminal, equal layers in one row, pages of HTML."""
