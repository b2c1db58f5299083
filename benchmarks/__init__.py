"""Measurements and long trials of the library; each module is a script with --help and says what it printed where."""
