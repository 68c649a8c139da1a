"""`attnreg tune`: times the backends that load on this machine, and writes orders with their evidence."""
