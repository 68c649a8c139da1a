"""The commands that show the effect of an upgrade: `diff`, `upgrade` and `lock`."""
