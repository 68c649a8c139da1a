"""The version of attnreg; the build reads this file, too."""

__version__ = "0.2.0"
