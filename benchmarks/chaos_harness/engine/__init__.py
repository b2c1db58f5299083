"""The storage engine driven by hand, in one process: everything that can go wrong around claims and floors."""
