"""The commands of authors of backends: `new` writes a package, `verify` proves claims, and `tune` times kernels."""
