"""One file per framework, each importing its framework only when used."""
