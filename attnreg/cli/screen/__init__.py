"""What a terminal shows beyond plain text: links from cited lines to their files."""
