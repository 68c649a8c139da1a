"""What `attnreg tune` measured, as data: the file of samples, the ranking that follows, and an order's evidence."""
