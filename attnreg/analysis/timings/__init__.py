"""The measurements of `attnreg tune` as data: the file of samples, the ranking, and an order's evidence."""
