"""The generated pages of docs/: a module for each, with the page's name."""
