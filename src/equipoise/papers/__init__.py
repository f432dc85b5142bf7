"""One folder per paper: its recipes, tables and figures as TOML, and the code that draws its figures."""
