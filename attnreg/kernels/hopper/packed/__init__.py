"""Few queries over a packed cache on SM 9.0, in Gluon: codes become operands in registers."""
