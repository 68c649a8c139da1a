"""The version of attnreg; the build reads this file, too."""

__version__ = "0.1.0"
