"""The picker: `attnreg explain` in a browser. What its pages show, made by attnreg, at the build and in the browser."""
