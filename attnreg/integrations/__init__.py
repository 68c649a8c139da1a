"""attnreg inside real engines: what they call things, in attnreg's words."""
