"""`attnreg tune`: times the backends that load on this machine, and writes the orders that follow, with evidence."""
