"""The docs and the site: their Markdown, their pages, and a browser."""
